"""Naive versions of the operations, one row, token and expert at a time, for tests to compare against.

Written from the papers, without the code under test. They are differentiable through autograd and meant for
float64 and tiny sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.models.config import ModelConfig


def grouped_product(a: Tensor, b: Tensor, sizes: Sequence[int], trans_b: bool) -> Tensor:
    """Every row of a [R, M] times the matrix of the group that it stands in -> [R, N]."""
    owners = [group for group, size in enumerate(sizes) for _ in range(size)]
    assert len(owners) == a.shape[0]
    matrices = [m.T if trans_b else m for m in b.unbind(0)]
    rows = [sum_products(row, matrices[group]) for row, group in zip(a.unbind(0), owners, strict=True)]
    return torch.stack(rows) if rows else a.new_zeros(0, matrices[0].shape[1]) + 0 * (a.sum() + b.sum())


def sum_products(row: Tensor, matrix: Tensor) -> Tensor:
    """row [M], matrix [M, N] -> [N]."""
    return (row.unsqueeze(1) * matrix).sum(dim=0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich 2019, over the last dim."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def activation(x: Tensor, name: str) -> Tensor:
    """The last dim holds gate, then up, for the gated ones."""
    if name in ("swiglu", "geglu"):
        half = x.shape[-1] // 2
        gate, up = x[..., :half], x[..., half:]
        return (gate / (1 + torch.exp(-gate)) if name == "swiglu" else gelu(gate)) * up
    return gelu(x) if name == "gelu" else torch.where(x > 0, x, torch.zeros_like(x))


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Sequence[int]) -> Tensor:
    """Sum of -log p(label) over the rows whose label is not -100."""
    total = 0 * (hidden.sum() + weight.sum())
    for row, label in zip(hidden.unbind(0), labels, strict=True):
        if label != -100:
            scores = weight @ row
            total = total + torch.log(torch.exp(scores - scores.max().detach()).sum())
            total = total + scores.max().detach() - scores[label]
    return total


def choose_experts(
    scores: Sequence[float],
    k: int,
    *,
    bias: Sequence[float] | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
) -> list[int]:
    """Best first; of equal ones the lower index. Groups by their best or the sum of their two best."""
    biased = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(biased) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    taken = 1 if group_score == "max" else 2

    def worth(group: int) -> float:
        return sum(sorted((biased[e] for e in groups[group]), reverse=True)[:taken])

    ranked = sorted(range(num_groups), key=lambda g: (-worth(g), g)) if num_groups > 1 else [0]
    best = ranked[: top_groups if num_groups > 1 else 1]
    allowed = [e for group in best for e in groups[group]]
    return sorted(allowed, key=lambda e: (-biased[e], e))[:k]


@dataclass(frozen=True, kw_only=True)
class TokenRouting:
    """What became of one token."""

    experts: list[int]
    weights: list[Tensor]
    logits: Tensor
    probabilities: Tensor


def route_token(logits: Tensor, bias: Sequence[float] | None, config: ModelConfig) -> TokenRouting:
    """logits [E] of one token: scores, selection with the bias, weights without it."""
    if config.router == "softmax":
        scores = torch.exp(logits) / torch.exp(logits).sum()
    else:
        scores = 1 / (1 + torch.exp(-logits))
    chosen = choose_experts(
        scores.tolist(),
        config.top_k,
        bias=bias,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        group_score=config.group_score,
    )
    weights = [scores[e] for e in chosen]
    if config.normalize_weights:
        total = sum(weights, torch.zeros_like(weights[0]))
        weights = [w / total for w in weights]
    weights = [w * config.route_scale for w in weights]
    return TokenRouting(experts=chosen, weights=weights, logits=logits, probabilities=scores / scores.sum())


def feed_forward(x: Tensor, w13: Tensor, w2: Tensor, name: str) -> Tensor:
    """One token x [D] -> [D]."""
    return w2 @ activation(w13 @ x, name)


def moe_token(x: Tensor, weights: Mapping[str, Tensor], config: ModelConfig) -> tuple[Tensor, TokenRouting]:
    """One token x [D] through a MoE layer whose weights have the names of `MoE.state_dict`."""
    routing = route_token(weights["router.weight"] @ x, weights["router.bias"].tolist(), config)
    out = shared_experts(x, weights, config)
    for expert, weight in zip(routing.experts, routing.weights, strict=True):
        w13, w2 = weights["experts.w13"][expert], weights["experts.w2"][expert]
        out = out + weight * feed_forward(x, w13, w2, config.activation)
    return out, routing


def shared_experts(x: Tensor, weights: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """The part of a MoE layer's output that no router decides; x [D] -> [D]."""
    if not config.num_shared_experts:
        return torch.zeros_like(x)
    out = feed_forward(x, weights["shared.w13.weight"], weights["shared.w2.weight"], config.activation)
    if not config.shared_gate:
        return out
    gate = (weights["gate.weight"][0] * x).sum()
    return out / (1 + torch.exp(-gate))


def load_counts(tokens: Sequence[TokenRouting], num_experts: int) -> list[int]:
    """Pairs that chose each expert."""
    return [sum(t.experts.count(e) for t in tokens) for e in range(num_experts)]


def load_balance(tokens: Sequence[TokenRouting], config: ModelConfig) -> Tensor:
    """E/K * sum_e f_e P_e over these tokens (1 when even); f counts choices per token, P is the mean probability."""
    num_experts = config.num_experts
    total = torch.zeros((), dtype=torch.float64)
    for expert, count in enumerate(load_counts(tokens, num_experts)):
        mean = sum((t.probabilities[expert] for t in tokens), torch.zeros((), dtype=torch.float64))
        total = total + count / len(tokens) * mean / len(tokens)
    return total * num_experts / config.top_k


def z_loss_sum(tokens: Sequence[TokenRouting]) -> Tensor:
    """Sum of (ln sum exp logits)^2."""
    squares = [torch.log(torch.exp(t.logits).sum()) ** 2 for t in tokens]
    return sum(squares, torch.zeros((), dtype=torch.float64))
