"""The one type that every router returns and everything downstream reads.

Shape suffixes here and in the files beside it: T tokens, K choices per token, E experts, B sequences, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which token goes to which expert with which weight, and what the losses need to know of it.

    Every strategy fits: a router with a variable number of choices pads K and marks the padding in `kept`.
    A (token, choice) pair that is not kept reaches no expert and adds exactly zero to the token's output.
    """

    experts: Tensor
    """[T, K] int64: the chosen experts, best first."""
    weights: Tensor
    """[T, K] float32: combine weights. Gradient reaches the router through them."""
    kept: Tensor | None
    """[T, K] bool: pairs that are computed; None means all of them."""
    logits: Tensor
    """[T, E] float32: what the router computed, for the z-loss."""
    probabilities: Tensor
    """[T, E] float32: scores normalised over the experts, for the load-balance loss."""
    real: Tensor | None
    """[T] bool: False on padding, which is in no loss, no count and no expert; None means all real."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits.shape[1]
