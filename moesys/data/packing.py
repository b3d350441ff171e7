"""From a stream of tokens to samples, in an order that any process can compute for itself.

A sample is a window of sequence_length + 1 tokens: the inputs, and one more for the last label. An epoch is
all whole windows, in an order that is a pure function of (seed, epoch); so a batch is a pure function of
(seed, index of its first sample), whichever process asks, and resuming needs nothing but the index.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from moesys.data.batch import IGNORED, Batch
from moesys.data.dataset import TokenDataset

ROUNDS = 8


def permuted(indices: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of range(size), keyed by (seed, epoch), puts each index.

    int64 in, int64 out, O(1) memory in size. A balanced Feistel network over the smallest even number of bits
    that holds size, walked along its cycle until it is back in range (Black and Rogaway 2002), with
    SplitMix64's finaliser as the round function. Raises ValueError for an index outside range(size).
    """
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise ValueError(f"indices must lie in 0..{size - 1}, got {indices.min()}..{indices.max()}")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    digest = blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS, person=b"sample-order").digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = indices.astype(np.uint64)
    todo = np.arange(values.size)
    flat = values.reshape(-1)
    while todo.size:
        flat[todo] = _feistel(flat[todo], half, keys)
        todo = todo[flat[todo] >= size]
    return flat.reshape(indices.shape).astype(np.int64)


def pack(dataset: TokenDataset, windows: np.ndarray, length: int, *, cross_document_attention: bool) -> Batch:
    """The windows of length tokens that start at the given places of the stream, with their next tokens.

    A window that the stream's end cuts short is padded: end-of-text, label -100, document -1.
    """
    shape = (len(windows), length)
    tokens = np.full(shape, dataset.eot_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    documents = np.full(shape, -1, dtype=np.int64)
    for row, window in enumerate(windows.tolist()):
        stream = dataset.read(window, min(window + length + 1, dataset.num_tokens))
        count = len(stream) - 1
        place = np.arange(count)
        tokens[row, :count], labels[row, :count] = stream[:-1], stream[1:]
        if cross_document_attention:
            positions[row, :count], documents[row, :count] = place, 0
            continue
        starts = dataset.starts(window, stream)
        labels[row, :count][starts[1:] & (stream[1:] != dataset.eot_id)] = IGNORED
        starts = starts[:-1]
        starts[:1] = True
        positions[row, :count] = place - np.maximum.accumulate(np.where(starts, place, 0))
        documents[row, :count] = np.cumsum(starts) - 1
    return Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        documents=torch.from_numpy(documents),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStream:
    """Samples without end, epoch after epoch, each a pure function of (seed, global sample index).

    Raises ValueError when the dataset is shorter than one sample.
    """

    dataset: TokenDataset
    sequence_length: int
    seed: int
    cross_document_attention: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"training.sequence_length must be at least 1, got {self.sequence_length}")
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"the training text has {self.dataset.num_tokens} tokens, one sample of "
                f"training.sequence_length {self.sequence_length} takes {self.sequence_length + 1}; give more text "
                "or a shorter sequence"
            )

    @property
    def samples_per_epoch(self) -> int:
        """Whole windows in the stream; the tokens after the last one are left out of the epoch."""
        return (self.dataset.num_tokens - 1) // self.sequence_length

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample .. first_sample + count - 1, counted over all epochs: [count, sequence_length]."""
        if first_sample < 0 or count < 1:
            raise ValueError(
                f"samples count from 0 and a batch has at least 1, got {first_sample} and {count}"
            )
        epochs, indices = np.divmod(np.arange(first_sample, first_sample + count), self.samples_per_epoch)
        windows = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(indices[here], self.samples_per_epoch, seed=self.seed, epoch=int(epoch))
        return pack(
            self.dataset,
            windows * self.sequence_length,
            self.sequence_length,
            cross_document_attention=self.cross_document_attention,
        )


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
