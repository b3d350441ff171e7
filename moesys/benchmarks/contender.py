"""What the training-step benchmark times: a model with its loss, whoever wrote it, and a step of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEARNING_RATE = 1e-6
"""So small that the routing stays as initialised: without a balance loss, that of a learning model collapses."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model in training mode, its loss, and its routing."""

    name: str
    model: torch.nn.Module
    loss: Callable[[Tensor], Tensor]
    """Mean cross-entropy of every token after the first of a sequence, in nats, from tokens int64 [B, S]."""
    loads: Callable[[Tensor], Tensor]
    """Tokens that every expert gets from tokens int64 [B, S]: int64 [MoE layers, experts]."""

    def optimizer(self) -> torch.optim.Optimizer:
        """A fresh fused AdamW over all parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)

    def num_parameters(self) -> int:
        """Number of trained elements; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def time_step(contender: Contender, optimizer: torch.optim.Optimizer, tokens: Tensor) -> tuple[float, float]:
    """Seconds of one step (forward, loss, backward, update) on tokens int64 [B, S], and its loss in nats."""
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = contender.loss(tokens)
    loss.backward()
    optimizer.step()
    value = loss.item()
    return time.perf_counter() - start, value


def draw_tokens(vocab_size: int, batch: int, sequence: int, seed: int) -> Tensor:
    """Tokens int64 [batch, sequence], every one equally likely."""
    return torch.randint(vocab_size, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def imbalance(loads: Tensor) -> float:
    """Fullest expert's load over the mean, averaged over layers; 1 is even. `loads` is [layers, experts]."""
    return float((loads.amax(dim=1) / loads.double().mean(dim=1)).mean())
