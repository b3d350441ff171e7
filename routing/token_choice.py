"""Token-choice routing: every token picks its top-k experts. Plain functions of logits [T, E]."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesys.routing.assignment import Assignment
from moesys.routing.group_limited import limit_to_groups

GroupScore = Literal["max", "top2"]


def top_k_stable(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores, best first; of equal scores the lower index first, on every device.

    scores [T, E] -> [T, k] int64. (`torch.topk` leaves the order of ties open.)
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def route(
    logits: Tensor,
    *,
    k: int,
    score: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float = 1.0,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2",
    real: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Assignment:
    """Top-k token choice over softmax or sigmoid scores, with group limits and a selection bias.

    1. s = softmax(logits) or sigmoid(logits), in float32 or better.
    2. Selection: the top k of s + bias, inside the top_groups best of num_groups equal groups of experts.
    3. Weights: s of the chosen (the bias never enters), divided by their sum if normalize, times scale.

    logits [T, E]; bias [E] float32 or None; real [T] bool or None (padding is not routed); chosen [T, k] int64
    replays a selection that was made before, so that recomputation can not choose differently.
    Sources: Shazeer et al. 2017 (softmax), DeepSeek-V2 (groups by maximum), DeepSeek-V3 (sigmoid, bias, groups by
    the two best). Edges: k = E chooses all; ties go to the lower index; with no tokens every result is empty;
    k = 1 with softmax and normalize would make every weight 1 and cut the router off from the loss, which the
    model's configuration refuses.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
    if chosen is None:
        with torch.no_grad():
            selection = scores if bias is None else scores + bias
            if num_groups > 1:
                selection = limit_to_groups(selection, num_groups, top_groups, group_score)
            chosen = top_k_stable(selection, k)
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    if scale != 1.0:
        weights = weights * scale
    probabilities = (
        scores if score == "softmax" else scores / scores.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    )
    kept = None if real is None else real.unsqueeze(1).expand_as(chosen)
    return Assignment(
        experts=chosen,
        weights=weights,
        kept=kept,
        logits=logits,
        probabilities=probabilities,
        real=real,
    )
