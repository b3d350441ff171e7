"""Load figures of one layer, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """How the (token, choice) pairs of one layer were spread over its experts in one step."""

    share: list[float]
    """Share of the chosen pairs, per expert; sums to 1 (all zero when nothing was routed)."""
    max_violation: float
    """Largest load / mean load - 1; 0 is even."""
    entropy: float
    """Entropy of the share, in nats; ln E is even."""
    dropped_share: float
    """Share of the chosen pairs that no expert computed."""
    dead: int
    """Experts that got nothing."""


def load_figures(chosen: Tensor, computed: Tensor) -> LoadFigures:
    """Figures from the pairs that chose each expert and the pairs that each computed, both [E] integers."""
    chosen = chosen.to(torch.float64)
    total = chosen.sum()
    if total == 0:
        return LoadFigures(
            share=[0.0] * len(chosen), max_violation=0.0, entropy=0.0, dropped_share=0.0, dead=len(chosen)
        )
    share = chosen / total
    return LoadFigures(
        share=share.tolist(),
        max_violation=float(share.max() * len(share) - 1),
        entropy=abs(float(torch.special.xlogy(share, share).sum())),  # the sum is never above 0
        dropped_share=float(1 - computed.sum() / total),
        dead=int((chosen == 0).sum()),
    )
