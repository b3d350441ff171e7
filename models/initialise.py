"""Initial values, a pure function of (seed, parameter name): the same on every layout and device."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from moesys.models.config import ModelConfig
from moesys.models.experts import Experts
from moesys.models.layers import RMSNorm
from moesys.models.transformer import Transformer

_INTO_THE_STREAM = ("attention.out.weight", "w2", "w2.weight")


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer.

    Norm weights are 1, biases 0, everything else is normal with config.init_std; matrices that write into the
    residual stream are scaled by 1/sqrt(2 * num_layers) (GPT-2). Every expert has a key of its own, so a rank that
    holds some of the experts draws the values that one process would.
    """
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    stacked = {
        id(weight)
        for module in model.modules()
        if isinstance(module, Experts)
        for weight in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif id(parameter) in stacked:
            for expert, matrix in enumerate(parameter):
                matrix.copy_(draw(f"{name}.{expert}", matrix, seed, std_of(name, model.config)))
        else:
            parameter.copy_(draw(name, parameter, seed, std_of(name, model.config)))
    for buffer in model.buffers():
        buffer.zero_()


def std_of(name: str, config: ModelConfig) -> float:
    """Standard deviation of the weight of that name."""
    if name.endswith(_INTO_THE_STREAM):
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std


def draw(key: str, like: Tensor, seed: int, std: float) -> Tensor:
    """Normal values of the shape of `like`, drawn on the CPU in float32 by a generator keyed with (seed, key)."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(like.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def build(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """An initialised model of one dtype on a device."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    model.to(dtype=dtype)
    initialise(model, seed)
    return model
