"""Loss and bits per byte on held-out text, without any training penalty in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moesys.data import TokenDataset, bits_per_byte, evaluation_batches
from moesys.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out figures."""

    loss: float
    """Cross-entropy per predicted token, in nats."""
    bits_per_byte: float
    """Cross-entropy in bits per UTF-8 byte of the predicted text."""
    tokens: int
    """Predicted tokens."""
    num_bytes: float
    """Bytes of the predicted text."""
    exact_bytes: bool
    """False when the tokenizer does not say each token's bytes, so that num_bytes is a share of the documents'."""


@torch.no_grad()
def evaluate(
    model: Transformer,
    dataset: TokenDataset,
    *,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    cross_document_attention: bool = False,
    chunk: int = 256,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Predict every token once in windows of sequence_length, or evenly spread windows of max_tokens in all.

    `on_batch` is told the number of tokens after each batch. The sum is kept in float64.
    """
    device = model.embedding.device
    nats, tokens, num_bytes, exact = 0.0, 0, 0.0, True
    for batch in evaluation_batches(
        dataset, sequence_length, batch_size, max_tokens, cross_document_attention=cross_document_attention
    ):
        moved = batch.to(device)
        sums = model(moved.tokens, moved.labels, moved.positions, moved.documents, chunk)
        nats += float(sums.ce)
        tokens += batch.num_labels
        num_bytes += batch.num_bytes
        exact = exact and batch.exact_bytes
        on_batch(batch.num_labels)
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=bits_per_byte(nats, num_bytes),
        tokens=tokens,
        num_bytes=num_bytes,
        exact_bytes=exact,
    )
