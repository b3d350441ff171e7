"""The Mixture-of-Experts layer. B sequences, S positions, T = B * S tokens, K choices, E experts, D width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesys.models.config import ModelConfig
from moesys.models.dispatch import LocalDispatcher
from moesys.models.experts import Experts
from moesys.models.feed_forward import FeedForward
from moesys.models.layers import linear
from moesys.routing.assignment import Assignment
from moesys.routing.losses import chosen_counts, probability_sum, sequence_load_balance_sum, z_loss_sum
from moesys.routing.router import TopKRouter


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What one layer's routing leaves behind: sums for the losses, counts for balancing and metrics."""

    chosen: Tensor
    """[E] int64: pairs that chose each expert (real tokens, before drops)."""
    computed: Tensor
    """[E] int64: pairs that each expert computed."""
    load_balance_sum: Tensor
    """Sum over sequences of the load-balance loss of scope `sequence`; float32, with gradient."""
    probability_sum: Tensor
    """[E] float32: sum over real tokens of the probabilities, with gradient; for scope `batch`."""
    z_sum: Tensor
    """Sum over real tokens of logsumexp(logits)^2; float32, with gradient."""


class RoutingMemory:
    """Remembers one layer's selection, so that recomputation replays it and never routes again."""

    def __init__(self) -> None:
        self.chosen: Tensor | None = None


class MoE(nn.Module):
    """Router, routed experts and shared experts: y = shared(x) + sum over k of weight_k * expert_k(x).

    `dispatcher` is not part of the weights: parallelism replaces it from outside.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = TopKRouter(
            d_model=config.d_model,
            num_experts=config.num_experts,
            top_k=config.top_k,
            score=config.router,
            normalize=config.normalize_weights,
            scale=config.route_scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_score=config.group_score,
        )
        self.experts = Experts(config.num_experts, config.d_model, config.d_expert, config.activation)
        self.shared: FeedForward | None = None
        self.gate: nn.Linear | None = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.d_expert
            self.shared = FeedForward(config.d_model, width, config.activation)
            if config.shared_gate:
                self.gate = linear(config.d_model, 1)
        self.dispatcher = LocalDispatcher()

    def forward(
        self, x: Tensor, real: Tensor | None = None, memory: RoutingMemory | None = None
    ) -> tuple[Tensor, RoutingReport]:
        """x [B, S, D], real [B, S] bool or None (all real) -> [B, S, D] and the report of the routing."""
        tokens = x.flatten(0, 1)
        assignment = self.route(tokens, None if real is None else real.flatten(), memory)
        dispatched = self.dispatcher.dispatch(tokens, assignment)
        shared = self.shared_output(tokens)
        rows = self.experts(dispatched.rows, dispatched.counts)
        out = self.dispatcher.combine(rows, dispatched)
        if shared is not None:
            out = out + shared
        return out.view_as(x), report(assignment, x.shape[0])

    def route(self, tokens: Tensor, real: Tensor | None, memory: RoutingMemory | None) -> Assignment:
        """tokens [T, D] -> assignment; `memory` is filled at the first call and replayed at the second."""
        if memory is None:
            return self.router(tokens, real)
        assignment = self.router(tokens, real, memory.chosen)
        memory.chosen = assignment.experts
        return assignment

    def shared_output(self, tokens: Tensor) -> Tensor | None:
        """tokens [T, D] -> [T, D], or None where the layer has no shared expert."""
        if self.shared is None:
            return None
        out = self.shared(tokens)
        return out if self.gate is None else torch.sigmoid(self.gate(tokens)) * out


def report(assignment: Assignment, num_sequences: int) -> RoutingReport:
    """Sums and counts of one layer's routing; the counts carry no gradient."""
    chosen = chosen_counts(assignment)
    computed = chosen
    if assignment.kept is not None:
        computed = torch.bincount(assignment.experts[assignment.kept], minlength=assignment.num_experts)
    return RoutingReport(
        chosen=chosen,
        computed=computed,
        load_balance_sum=sequence_load_balance_sum(assignment, num_sequences),
        probability_sum=probability_sum(assignment),
        z_sum=z_loss_sum(assignment),
    )
