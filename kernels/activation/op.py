"""Activations of feed-forward layers. The gated ones save only their input and compute the rest again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_GATED = ("swiglu", "geglu")


def is_gated(activation: str) -> bool:
    """Whether the activation takes [gate, up] rows of twice the inner width."""
    return activation in _GATED


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply a feed-forward activation.

    "swiglu", "geglu": x [..., 2F] = gate, then up -> act(gate) * up [..., F]; "gelu" (exact), "relu": same shape.
    """
    if activation == "swiglu":
        return _SwiGLU.apply(x)
    if activation == "geglu":
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate) * up
    return F.gelu(x) if activation == "gelu" else F.relu(x)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return out
