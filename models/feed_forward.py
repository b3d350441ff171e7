"""The dense feed-forward layer; also the form of the shared experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesys.kernels.activation import is_gated
from moesys.kernels.expert_mlp import expert_mlp
from moesys.models.layers import linear


class FeedForward(nn.Module):
    """w2 act(w13 x). Gated activations take gate rows, then up rows, from one product: w13 [2F, D], w2 [D, F]."""

    def __init__(self, d_model: int, d_inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.w13 = linear(d_model, 2 * d_inner if is_gated(activation) else d_inner)
        self.w2 = linear(d_inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]. It is one expert that gets every token."""
        rows = x.reshape(-1, x.shape[-1])
        counts = torch.full((1,), rows.shape[0], device=rows.device)
        w13, w2 = self.w13.weight.unsqueeze(0), self.w2.weight.unsqueeze(0)
        return expert_mlp(rows, w13, w2, counts, self.activation).view_as(x)
