"""Measuring a model on held-out text: windows, bits per byte, and the yardstick of a general compressor."""

from __future__ import annotations

import json
import lzma
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
import torch

from moesys.data.batch import IGNORED, EvaluationBatch
from moesys.data.dataset import TokenDataset
from moesys.data.packing import pack
from moesys.data.tokenizer import Tokenizer

XZ_LIMIT = 16 * 2**20
"""The yardstick reads at most this many bytes of text, about ten seconds' work."""


def evaluation_batches(
    dataset: TokenDataset,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    cross_document_attention: bool = False,
) -> Iterator[EvaluationBatch]:
    """Consecutive windows that predict every token of the stream after the first exactly once.

    The last window is padded (label -100, document -1); the last batch may have fewer rows. With max_tokens,
    the whole windows that fit it (at least one), spread evenly over the stream, the same ones every time.
    Raises ValueError when the stream is too short to predict anything.
    """
    if dataset.num_tokens < 2:
        raise ValueError(
            f"{dataset.name} has {dataset.num_tokens} token, evaluation needs at least 2; give more text"
        )
    if batch_size < 1 or sequence_length < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(
            "batch_size, sequence_length and max_tokens must be at least 1, got "
            f"{batch_size}, {sequence_length} and {max_tokens}"
        )
    total = -(-(dataset.num_tokens - 1) // sequence_length)
    count = total if max_tokens is None else min(total, max(1, max_tokens // sequence_length))
    windows = (2 * np.arange(count) + 1) * total // (2 * count) * sequence_length
    for first in range(0, count, batch_size):
        yield _batch(dataset, windows[first : first + batch_size], sequence_length, cross_document_attention)


def bits_per_byte(total_nats: float, num_bytes: float) -> float:
    """Bits spent on a byte of text: total_nats / ln 2 / num_bytes, comparable across tokenizers."""
    if num_bytes <= 0:
        raise ValueError(f"bits per byte need text to divide by, got {num_bytes} bytes")
    return total_nats / math.log(2) / num_bytes


def xz_bits_per_byte(documents: Iterable[bytes]) -> float:
    """Bits per byte that `xz -9` needs for the documents as one text. Takes about 700 MB of memory."""
    compressor = lzma.LZMACompressor(preset=9)
    size = packed = 0
    for document in documents:
        size += len(document)
        packed += len(compressor.compress(document))
    packed += len(compressor.flush())
    return bits_per_byte(8 * packed * math.log(2), size)


def dataset_xz_bits_per_byte(dataset: TokenDataset, tokenizer: Tokenizer) -> float:
    """The same for a dataset's text (16 MiB of it, from the start), computed once per cache entry."""
    kept = None if dataset.folder is None else dataset.folder / "xz.json"
    if kept is not None and kept.is_file():
        # A damaged file is no loss: the figure is computed again.
        with suppress(ValueError, KeyError, TypeError, OSError):
            return float(json.loads(kept.read_text())["bits_per_byte"])
    value = xz_bits_per_byte(_texts(dataset, tokenizer))
    if kept is not None:
        with suppress(OSError):  # a cache that is full or read-only costs time, not the figure
            scratch = kept.with_name(f"xz.{os.getpid()}.json")
            scratch.write_text(json.dumps({"bits_per_byte": value}))
            scratch.replace(kept)
    return value


def _texts(dataset: TokenDataset, tokenizer: Tokenizer) -> Iterator[bytes]:
    left = XZ_LIMIT
    for start in range(0, dataset.num_tokens, XZ_LIMIT // 16):
        stop = min(start + XZ_LIMIT // 16, dataset.num_tokens)
        text = tokenizer.decode_bytes(dataset.read(start, stop).tolist())[:left]
        yield text
        left -= len(text)
        if left <= 0:
            return


def _batch(
    dataset: TokenDataset, windows: np.ndarray, length: int, cross_document_attention: bool
) -> EvaluationBatch:
    batch = pack(dataset, windows, length, cross_document_attention=cross_document_attention)
    # Without the documents' bytes (Megatron files) the table is the best there is.
    if dataset.exact_bytes or dataset.document_bytes is None:
        labels = batch.labels.numpy()
        table = np.append(dataset.token_bytes, 0)
        row_bytes = table[np.where(labels == IGNORED, -1, labels)].sum(axis=1, dtype=np.float64)
    else:
        ends = np.minimum(windows + length + 1, dataset.num_tokens)
        spans = zip((windows + 1).tolist(), ends.tolist(), strict=True)
        row_bytes = np.array([dataset.bytes_before(b) - dataset.bytes_before(a) for a, b in spans])
    return EvaluationBatch(
        tokens=batch.tokens,
        labels=batch.labels,
        positions=batch.positions,
        documents=batch.documents,
        row_bytes=torch.from_numpy(row_bytes),
        exact_bytes=dataset.exact_bytes,
    )
