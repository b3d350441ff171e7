"""Group-limited selection: a token may only use experts of its best groups (devices or nodes)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def limit_to_groups(
    scores: Tensor, num_groups: int, top_groups: int, group_score: Literal["max", "top2"]
) -> Tensor:
    """Scores with -inf outside each token's top_groups best groups.

    scores [T, E], experts split into num_groups equal consecutive groups. A group's score is its largest
    (DeepSeek-V2, section 2.2.2) or the sum of its two largest (DeepSeek-V3, section 2.1.2). Ties go to the lower
    group index.
    """
    num_tokens, num_experts = scores.shape
    grouped = scores.view(num_tokens, num_groups, num_experts // num_groups)
    best = grouped.amax(dim=-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    winners = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
    allowed = best.new_zeros(best.shape, dtype=torch.bool).scatter_(1, winners, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(num_tokens, num_experts)
