"""Router losses as sums over their own units, so that the caller divides by the global number of units.

A sum over the micro-batch's sequences (or tokens) divided by the number in the whole global batch gives the same
loss and gradient however the batch is cut into micro-batches or spread over ranks.
T tokens = B sequences * S positions, K choices per token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.routing.assignment import Assignment


def sequence_load_balance_sum(assignment: Assignment, num_sequences: int) -> Tensor:
    """Sum over sequences of E/K * sum_e f_e P_e, each 1.0 when its load is even.

    f_e: chosen pairs of expert e per real token (no gradient), P_e: mean probability of e over the real tokens of
    the sequence. A sequence without real tokens adds 0. Source: DeepSeek-V3 (sequence-wise auxiliary loss),
    the product form of Switch Transformers, equation 4. Returns a float32 (or wider) scalar.
    """
    T, E = assignment.logits.shape
    shape = (num_sequences, T // max(num_sequences, 1))
    chosen = one_hot_pairs(assignment).view(*shape, E)
    probabilities = assignment.probabilities.view(*shape, E)
    if assignment.real is None:
        real_tokens = torch.full(
            (num_sequences, 1), shape[1], device=chosen.device, dtype=probabilities.dtype
        )
    else:
        real = assignment.real.view(*shape, 1)
        probabilities = probabilities * real
        real_tokens = real.sum(dim=1).clamp(min=1).to(probabilities.dtype)
    f = chosen.sum(dim=1) / real_tokens
    P = probabilities.sum(dim=1) / real_tokens
    return (f * P).sum() * (E / assignment.experts.shape[1])


def probability_sum(assignment: Assignment) -> Tensor:
    """Sum over real tokens of the probabilities. [E], with gradient."""
    if assignment.real is None:
        return assignment.probabilities.sum(dim=0)
    return (assignment.probabilities * assignment.real.unsqueeze(1)).sum(dim=0)


def batch_load_balance(
    probabilities: Tensor, chosen: Tensor, num_tokens: Tensor | float, choices: int
) -> Tensor:
    """E/K * sum_e f_e P_e over the global batch; 1.0 when even.

    probabilities [E]: sum over tokens of this part of the batch (with gradient); chosen [E]: pairs per expert over
    the WHOLE global batch; num_tokens: real tokens of the whole batch. The parts' results add up to the loss.
    """
    f = chosen.to(probabilities.dtype) / num_tokens
    return (f * probabilities / num_tokens).sum() * (probabilities.shape[0] / choices)


def z_loss_sum(assignment: Assignment) -> Tensor:
    """Sum over real tokens of logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022, equation 5)."""
    squares = assignment.logits.logsumexp(dim=-1).square()
    return squares.sum() if assignment.real is None else (squares * assignment.real).sum()


def chosen_counts(assignment: Assignment) -> Tensor:
    """Pairs that chose each expert, real tokens only, before any drop. [E] int64."""
    experts = assignment.experts
    if assignment.real is not None:
        experts = experts[assignment.real]
    return torch.bincount(experts.reshape(-1), minlength=assignment.num_experts)


def one_hot_pairs(assignment: Assignment) -> Tensor:
    """How often each token chose each expert; 0 on padding. [T, E] in the dtype of the probabilities."""
    chosen = torch.zeros_like(assignment.probabilities, requires_grad=False)
    ones = torch.ones_like(assignment.weights, requires_grad=False).to(chosen.dtype)
    if assignment.real is not None:
        ones = ones * assignment.real.unsqueeze(1)
    return chosen.scatter_add_(1, assignment.experts, ones)
