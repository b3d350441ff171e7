"""This project's side of the training-step benchmark."""

from __future__ import annotations

import torch
from torch import Tensor

from moesys.benchmarks.contender import Contender
from moesys.kernels.cross_entropy import IGNORE
from moesys.models.config import ModelConfig
from moesys.models.initialise import build
from moesys.models.transformer import LossSums, shift


def moesys_contender(config: ModelConfig, *, seed: int) -> Contender:
    """This project's model of `config`, initialised with `seed`, in float32 on the CPU.

    The loss is the cross-entropy alone, as on the other side: no balance loss, no update of the router bias.
    """
    model = build(config, seed, torch.float32, "cpu").train()

    def run(tokens: Tensor) -> LossSums:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(tokens, shift(tokens, 1, IGNORE), positions, torch.zeros_like(tokens))

    def loads(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([report.chosen for report in run(tokens).routing.values()])

    def loss(tokens: Tensor) -> Tensor:
        return run(tokens).ce / (tokens.shape[0] * (tokens.shape[1] - 1))

    return Contender(name="moesys", model=model, loss=loss, loads=loads)
