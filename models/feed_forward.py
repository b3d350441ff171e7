"""The dense feed-forward layer; also the form of the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from moesys.kernels.activation import activate, is_gated
from moesys.models.layers import linear


class FeedForward(nn.Module):
    """w2 act(w13 x). Gated activations take gate rows, then up rows, from one product: w13 [2F, D], w2 [D, F]."""

    def __init__(self, d_model: int, d_inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.w13 = linear(d_model, 2 * d_inner if is_gated(activation) else d_inner)
        self.w2 = linear(d_inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return self.w2(activate(self.w13(x), self.activation))
