"""Stacked experts. R routed rows sorted by expert, E experts, D model width, F expert width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesys.kernels.activation import is_gated
from moesys.kernels.expert_mlp import expert_mlp


class Experts(nn.Module):
    """All experts of a layer as two stacked weights, in one layout everywhere.

    w13 [E, 2F, D]: gate rows, then up rows ([E, F, D] for activations without a gate); w2 [E, D, F].
    """

    def __init__(self, num_experts: int, d_model: int, d_expert: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        inner = 2 * d_expert if is_gated(activation) else d_expert
        self.w13 = nn.Parameter(torch.empty(num_experts, inner, d_model))
        self.w2 = nn.Parameter(torch.empty(num_experts, d_model, d_expert))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [R, D] sorted by expert, counts [E] rows per expert -> [R, D]."""
        return expert_mlp(rows, self.w13, self.w2, counts, self.activation)
