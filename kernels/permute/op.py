"""Permute and unpermute: gathers in both directions, no atomics, so the result does not depend on timing.

T tokens, K choices per token, E experts, R routed rows (at most T*K), D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Where every routed row comes from and where every (token, choice) pair went."""

    tokens: Tensor
    """[R] int64: the token of each row; rows are sorted by expert, inside an expert by token, then choice."""
    pairs: Tensor
    """[R] int64: token * K + choice of each row."""
    rows: Tensor
    """[T, K] int64: the row of each pair; R (one past the end) where the pair was not routed."""
    counts: Tensor
    """[E] int64: rows per expert."""


def sort_pairs(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Permutation:
    """Order the pairs by expert, stably. experts [T, K] int64; kept [T, K] bool or None for all of them."""
    num_tokens, choices = experts.shape
    keys = experts if kept is None else experts.masked_fill(~kept, num_experts)
    keys = keys.reshape(-1)
    counts = torch.bincount(keys, minlength=num_experts)[:num_experts]
    pairs = keys.argsort(stable=True)
    if kept is not None:
        pairs = pairs[: int(counts.sum())]
    rows = torch.full((num_tokens * choices,), pairs.shape[0], dtype=torch.int64, device=experts.device)
    rows[pairs] = torch.arange(pairs.shape[0], device=experts.device)
    return Permutation(
        tokens=pairs // choices, pairs=pairs, rows=rows.view(num_tokens, choices), counts=counts
    )


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Copy each token's vector to its rows. x [T, D] -> [R, D]. Its gradient sums in float32 or better."""
    return _Permute.apply(x, permutation.tokens, permutation.rows)


def unpermute(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    """Weighted sum of each token's rows, in float32 or better; exactly 0 where no pair was routed.

    rows [R, D], weights [T, K] float32 -> [T, D] in the dtype of rows. Differentiable in both.
    """
    return _Unpermute.apply(rows, weights, permutation.pairs, permutation.tokens, permutation.rows)


def _sum_rows(rows: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over k of weights[t, k] * rows[index[t, k]] in float32 or better; an index past the end adds nothing.

    Each token's sum is one sequential loop of `embedding_bag`, which neither reads nor weighs what was dropped.
    """
    wide = _wide(rows.dtype)
    if weights is not None:
        weights = weights.to(wide)
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], rows.shape[1], dtype=wide)
    rows = rows.to(wide)
    if rows.shape[0] == index.numel():
        return F.embedding_bag(index, rows, mode="sum", per_sample_weights=weights)
    kept = index < rows.shape[0]
    starts = kept.sum(dim=1).cumsum(0).roll(1)
    starts[0] = 0
    if weights is not None:
        weights = weights[kept]
    return F.embedding_bag(index[kept], rows, starts, mode="sum", per_sample_weights=weights)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (rows,) = ctx.saved_tensors
        return _sum_rows(grad, rows, None).to(grad.dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, pairs: Tensor, tokens: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, pairs, tokens)
        return _sum_rows(rows, index, weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        rows, weights, pairs, tokens = ctx.saved_tensors
        wide = _wide(grad.dtype)
        arriving = grad.index_select(0, tokens).to(wide)
        grad_weights = weights.new_zeros(weights.numel())
        grad_weights[pairs] = torch.linalg.vecdot(arriving, rows.to(wide)).to(weights.dtype)
        arriving *= weights.reshape(-1).to(wide).index_select(0, pairs).unsqueeze(1)
        return arriving.to(rows.dtype), grad_weights.view_as(weights), None, None, None
