"""`gmm`, with the names and meaning that users of the grouped_gemm package know.

Shapes: R rows sorted by group, E groups, M inner width, N outer width. Group sizes stay a tensor; the
`torch` back end never reads them on the host.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Backend = Literal["torch", "loop"]


def pick_backend(a: Tensor, b: Tensor) -> Backend:
    """The back end for these operands of `gmm`: `torch.nn.functional.grouped_mm` where it computes them and both
    gradients, else a loop of mm. grouped_mm has no float64 and wants strides of whole 16 bytes."""
    steps = (*a.shape[1:], *b.shape[1:], *(stride for stride in (*a.stride(), *b.stride()) if stride != 1))
    aligned = all(step * a.element_size() % 16 == 0 for step in steps)
    return "torch" if aligned and a.dtype in (torch.float32, torch.bfloat16, torch.float16) else "loop"


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False, *, backend: Backend | None = None
) -> Tensor:
    """One product per group: rows of group e times b[e], or times its transpose with trans_b.

    a [R, M], b [E, M, N] ([E, N, M] with trans_b), batch_sizes [E] integers, sum R -> [R, N] in a's dtype,
    accumulated in float32 or better. Differentiable in a and b; an empty group's gradient is exactly zero.
    Raises ValueError for shapes that do not fit each other.
    """
    if a.dim() != 2 or b.dim() != 3 or batch_sizes.shape != (b.shape[0],) or a.dtype != b.dtype:
        raise ValueError(
            "gmm takes a [R, M], b [E, M, N] (or [E, N, M] with trans_b) of one dtype and batch_sizes [E]; got "
            f"a {tuple(a.shape)} {a.dtype}, b {tuple(b.shape)} {b.dtype}, batch_sizes {tuple(batch_sizes.shape)}"
        )
    if a.shape[1] != b.shape[2 if trans_b else 1]:
        raise ValueError(
            f"gmm: a has width {a.shape[1]}, b {tuple(b.shape)} (trans_b={trans_b}) expects another"
        )
    return _GroupedGemm.apply(a, b, batch_sizes, trans_b, backend or pick_backend(a, b))


@torch.library.custom_op("moesys::grouped_product", mutates_args=())
def product(a: Tensor, b: Tensor, sizes: Tensor, trans_b: bool, backend: str) -> Tensor:
    """The forward alone, without autograd; arguments as in `gmm`."""
    if backend == "torch" and a.shape[0]:
        return F.grouped_mm(a, b.transpose(1, 2) if trans_b else b, offs=_ends(sizes))
    out = a.new_empty(a.shape[0], b.shape[1] if trans_b else b.shape[2])
    groups = sizes.tolist()
    for rows, matrix, into in zip(a.split(groups), b.unbind(0), out.split(groups), strict=True):
        torch.mm(rows, matrix.t() if trans_b else matrix, out=into)
    return out


@torch.library.custom_op("moesys::grouped_outer_product", mutates_args=())
def outer_product(x: Tensor, y: Tensor, sizes: Tensor, backend: str) -> Tensor:
    """Ragged inner dim: x_eᵀ·y_e for every group. x [R, M], y [R, N] -> [E, M, N]; zeros for empty groups."""
    if backend == "torch" and x.shape[0]:
        return F.grouped_mm(x.t(), y, offs=_ends(sizes))
    out = x.new_zeros(sizes.shape[0], x.shape[1], y.shape[1])
    groups = sizes.tolist()
    for left, right, into in zip(x.split(groups), y.split(groups), out.unbind(0), strict=True):
        torch.mm(left.t(), right, out=into)
    return out


@product.register_fake
def _(a: Tensor, b: Tensor, sizes: Tensor, trans_b: bool, backend: str) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1] if trans_b else b.shape[2])


@outer_product.register_fake
def _(x: Tensor, y: Tensor, sizes: Tensor, backend: str) -> Tensor:
    return x.new_empty(sizes.shape[0], x.shape[1], y.shape[1])


def _ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0).to(torch.int32)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, sizes: Tensor, trans_b: bool, backend: Backend) -> Tensor:
        ctx.save_for_backward(a, b, sizes)
        ctx.trans_b, ctx.backend = trans_b, backend
        return product(a, b, sizes, trans_b, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        a, b, sizes = ctx.saved_tensors
        grad = grad.contiguous()  # grouped_mm refuses the stride-0 gradient of a sum
        grad_a = product(grad, b, sizes, not ctx.trans_b, ctx.backend) if ctx.needs_input_grad[0] else None
        grad_b = None
        if ctx.needs_input_grad[1]:
            left, right = (grad, a) if ctx.trans_b else (a, grad)
            grad_b = outer_product(left, right, sizes, ctx.backend)
        return grad_a, grad_b, None, None, None
