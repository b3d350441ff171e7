"""RMSNorm (Zhang and Sennrich 2019) that saves only its input and one number per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 or better, in x's dtype.

    x [..., D], weight [D]. Differentiable in both.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        grad, wide_weight = grad.to(scale.dtype), weight.to(scale.dtype)
        normal = x.to(scale.dtype) * scale
        product = (grad * normal).reshape(-1, width)
        grad_weight = product.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = torch.mv(product, wide_weight).div_(width).view(scale.shape)
        grad_x = (grad * wide_weight).sub_(normal.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
