"""The module that holds a router's weights. What it decides stands in the plain functions beside it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from moesys.routing.assignment import Assignment
from moesys.routing.token_choice import GroupScore, route


class TopKRouter(nn.Module):
    """Linear scores and top-k token choice; see `route` for the steps.

    weight [E, D] and bias [E] stay float32 (float64 in a float64 model) whatever the model's dtype: the bias is a
    buffer that balancing moves, and near-ties must not flip with the precision of the rest.
    """

    bias: Tensor

    def __init__(
        self,
        *,
        d_model: int,
        num_experts: int,
        top_k: int,
        score: Literal["softmax", "sigmoid"],
        normalize: bool,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: GroupScore = "top2",
    ) -> None:
        super().__init__()
        self.top_k, self.score, self.normalize, self.scale = top_k, score, normalize, scale
        self.num_groups, self.top_groups, self.group_score = num_groups, top_groups, group_score
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x: Tensor, real: Tensor | None = None, chosen: Tensor | None = None) -> Assignment:
        """Route x [T, D]; real [T] bool or None; chosen [T, K] replays an earlier selection."""
        return route(
            torch.mm(x.to(self.weight.dtype), self.weight.t()),
            k=self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            bias=self.bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
            real=real,
            chosen=chosen,
        )
