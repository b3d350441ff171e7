"""The whole expert computation as one autograd operation.

It saves its input rows and the pre-activation and nothing else; the activation is computed again in the backward.
R routed rows sorted by expert, E experts, D model width, F expert width, W = 2F for gated activations, else F.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moesys.kernels.activation import activate, activate_backward, is_gated
from moesys.kernels.grouped_gemm import outer_product, pick_backend, product

BLOCK_ROWS = 1024
"""Rows that a CPU takes through all products and the activation at a time, so that they stay in its cache."""


def expert_mlp(rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor, activation: str) -> Tensor:
    """act(rows_e @ w13_e.T) @ w2_e.T for every expert e. Differentiable in rows, w13 and w2.

    rows [R, D], w13 [E, W, D], w2 [E, D, F], counts [E] integers, sum R -> [R, D]. All of one dtype; products
    accumulate in float32 or better. The gradient of an expert without rows is exactly zero.
    Raises ValueError for shapes that do not fit each other (on a GPU, where it would cost a wait, the sum of the
    counts is not looked at).
    """
    experts, inner, width = w13.shape
    half = inner // 2 if is_gated(activation) else inner
    fits = rows.dim() == 2 and rows.shape[1] == width and w2.shape == (experts, width, half)
    if not fits or counts.shape != (experts,) or not rows.dtype == w13.dtype == w2.dtype:
        raise ValueError(
            "expert_mlp takes rows [R, D], w13 [E, 2F, D] ([E, F, D] without a gate), w2 [E, D, F] of one dtype and "
            "counts [E]; got "
            f"{tuple(rows.shape)}, {tuple(w13.shape)}, {tuple(w2.shape)}, {tuple(counts.shape)} for {activation} in "
            f"{rows.dtype}, {w13.dtype}, {w2.dtype}"
        )
    return torch.ops.moesys.expert_mlp(rows, w13, w2, counts, activation)[0]


@torch.library.custom_op("moesys::expert_mlp", mutates_args=())
def _forward(rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Output [R, D] and the pre-activation [R, W]."""
    if not _in_blocks(rows):
        hidden = product(rows, w13, counts, True, pick_backend(rows, w13))
        return product(activate(hidden, activation), w2, counts, True, pick_backend(rows, w2)), hidden
    if int(counts.sum()) != rows.shape[0]:
        raise ValueError(f"expert_mlp: counts sum to {int(counts.sum())}, but there are {rows.shape[0]} rows")
    hidden, out = rows.new_empty(rows.shape[0], w13.shape[1]), torch.empty_like(rows)
    for expert, start, stop in _blocks(counts):
        before = torch.mm(rows[start:stop], w13[expert].t(), out=hidden[start:stop])
        torch.mm(activate(before, activation), w2[expert].t(), out=out[start:stop])
    return out, hidden


@torch.library.custom_op("moesys::expert_mlp_backward", mutates_args=())
def _backward(
    grad: Tensor, rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor, hidden: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, w13 and w2."""
    if not _in_blocks(rows):
        slope = product(grad, w2, counts, False, pick_backend(grad, w2))
        act, slope = activate_backward(hidden, slope, activation)
        return (
            product(slope, w13, counts, False, pick_backend(slope, w13)),
            outer_product(slope, rows, counts, pick_backend(rows, w13)),
            outer_product(grad, act, counts, pick_backend(grad, w2)),
        )
    grad_rows, grad_w13, grad_w2 = torch.empty_like(rows), torch.empty_like(w13), torch.empty_like(w2)
    seen = set()
    for expert, start, stop in _blocks(counts):
        above = grad[start:stop]
        act, slope = activate_backward(hidden[start:stop], torch.mm(above, w2[expert]), activation)
        torch.mm(slope, w13[expert], out=grad_rows[start:stop])
        if expert in seen:
            grad_w13[expert].addmm_(slope.t(), rows[start:stop])
            grad_w2[expert].addmm_(above.t(), act)
        else:
            seen.add(expert)
            torch.mm(slope.t(), rows[start:stop], out=grad_w13[expert])
            torch.mm(above.t(), act, out=grad_w2[expert])
    for expert in set(range(w13.shape[0])) - seen:
        grad_w13[expert].zero_()
        grad_w2[expert].zero_()
    return grad_rows, grad_w13, grad_w2


def _in_blocks(rows: Tensor) -> bool:
    """Whether to go expert by expert through the cache of a CPU, or take grouped products of all rows.

    Low precision takes the latter: adding up an expert's weight gradient block by block would round every time.
    """
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)


def _blocks(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, one past the last) of every block, in order."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        for first in range(start, start + count, BLOCK_ROWS):
            yield expert, first, min(first + BLOCK_ROWS, start + count)
        start += count


@_forward.register_fake
def _(rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], w13.shape[1])


@_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, w13: Tensor, w2: Tensor, counts: Tensor, hidden: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(w13), torch.empty_like(w2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, activation = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.activation = activation
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    rows, w13, w2, counts, hidden = ctx.saved_tensors
    grads = torch.ops.moesys.expert_mlp_backward(
        grad.contiguous(), rows, w13, w2, counts, hidden, ctx.activation
    )
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
