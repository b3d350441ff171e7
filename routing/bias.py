"""Auxiliary-loss-free balancing: a bias on the selection scores, moved once per optimiser step."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def update_bias_(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """b_e += rate * sign(mean load - load_e), in place (DeepSeek-V3, section 2.1.2; Wang et al. 2024).

    bias [E] float32; counts [E] integers: pairs per expert over the whole global batch of the step. An expert at
    the mean exactly does not move; with no tokens none does. Returns bias.
    """
    counts = counts.to(torch.float64)
    return bias.add_((counts.mean() - counts).sign().to(bias.dtype), alpha=rate)
