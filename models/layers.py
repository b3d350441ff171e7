"""Small building blocks that every model here uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesys.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm with a weight; computes in float32 or better, returns the dtype of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def linear(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """An `nn.Linear` whose values are left to `initialise`, so that building a model draws nothing random."""
    layer = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=bias)
    assert isinstance(layer, nn.Linear)
    return layer
