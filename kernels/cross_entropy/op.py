"""Fused chunked linear cross-entropy: the logits of at most `chunk` tokens exist at one time.

Liger-Kernel has this idea for GPUs; ours is plain PyTorch so that it runs on every device and in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of a position that has no target."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 256) -> Tensor:
    """Sum over tokens of the cross-entropy of hidden @ weight.T against labels, in nats.

    hidden [T, D], weight [V, D] of one dtype, labels [T] int64 (IGNORE where there is none) -> scalar in float32
    or better. The gradients are computed in the forward pass, chunk by chunk, and scaled in the backward.
    """
    if not torch.is_grad_enabled():  # a Function is not told so itself
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            real = labels[rows] != IGNORE
            target = labels[rows].clamp(min=0).unsqueeze(1)
            logits = hidden[rows] @ weight.t()
            log_probs = torch.log_softmax(logits, dim=-1, dtype=wide)
            total -= log_probs.gather(1, target).squeeze(1).masked_fill(~real, 0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = log_probs.exp_()
            slope.scatter_add_(1, target, slope.new_full(target.shape, -1.0))
            if not bool(real.all()):
                slope.mul_(real.unsqueeze(1))
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                if wide == weight.dtype:
                    grad_weight.addmm_(slope.t(), hidden[rows])
                else:
                    grad_weight += slope.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad).to(ctx.dtypes[0])
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, None, None
