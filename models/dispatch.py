"""Bringing tokens to their experts and back, on one device.

Expert parallelism puts a dispatcher of its own with the same two methods in this one's place, from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesys.kernels.permute import Permutation, permute, sort_pairs, unpermute
from moesys.routing.assignment import Assignment


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows at their experts, and what is needed to bring them back."""

    rows: Tensor
    """[R, D], sorted by expert, inside an expert in token order."""
    counts: Tensor
    """[E] int64: rows per expert that is held here."""
    permutation: Permutation
    weights: Tensor
    """[T, K] float32 combine weights."""


class LocalDispatcher:
    """All experts are here: a gather out, a weighted gather-and-sum in float32 back."""

    def dispatch(self, x: Tensor, assignment: Assignment) -> Dispatched:
        """x [T, D] -> rows grouped by expert."""
        permutation = sort_pairs(assignment.experts, assignment.num_experts, assignment.kept)
        return Dispatched(
            rows=permute(x, permutation),
            counts=permutation.counts,
            permutation=permutation,
            weights=assignment.weights,
        )

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Expert outputs [R, D] in the order of `dispatched.rows` -> [T, D]; 0 where nothing was routed."""
        return unpermute(rows, dispatched.weights, dispatched.permutation)
