"""Activations of feed-forward layers, with gradients that need the input alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GATED = ("swiglu", "geglu")


def is_gated(activation: str) -> bool:
    """Whether the activation takes [gate, up] columns of twice the inner width."""
    return activation in _GATED


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply a feed-forward activation.

    "swiglu", "geglu" (Shazeer 2020): x [R, 2F] = gate, then up -> act(gate) * up [R, F];
    "gelu" (exact), "relu": the same shape.
    """
    if not is_gated(activation):
        return F.relu(x) if activation == "relu" else F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate)).mul_(up)


def activate_backward(x: Tensor, grad: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of x once more, and the gradient of x. grad [R, F] -> [R, F] and the shape of x."""
    aten = torch.ops.aten
    if activation == "relu":
        out = F.relu(x)
        return out, aten.threshold_backward(grad, x, 0)
    if activation == "gelu":
        return F.gelu(x), aten.gelu_backward(grad, x)
    gate, up = x.chunk(2, dim=-1)
    grad_x = torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    out = F.silu(gate) if activation == "swiglu" else F.gelu(gate)
    torch.mul(out, grad, out=grad_up)
    slope = grad * up
    if activation == "swiglu":
        aten.silu_backward.grad_input(slope, gate, grad_input=grad_gate)
    else:
        aten.gelu_backward.grad_input(slope, gate, grad_input=grad_gate)
    return out.mul_(up), grad_x
