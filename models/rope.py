"""Rotary position embedding, with YaRN, in the half-split layout: dim i rotates with dim i + R/2.

B batch, S sequence, H heads, R rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesys.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig, rotated: int) -> Tensor:
    """Angle per position of each rotated pair. [R/2] float64.

    With yarn_factor > 1, frequencies that turn less than beta_slow times within the original length are divided
    by the factor, those above beta_fast stay, with a linear ramp between (Peng et al. 2023; DeepSeek-V2, 3.1.4).
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
    frequencies = config.rope_theta**-exponents
    if config.yarn_factor == 1.0:
        return frequencies

    def dim_that_turns(rotations: float) -> float:
        length = config.yarn_original_length
        return rotated * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dim_that_turns(config.yarn_beta_fast)), 0)
    high = min(math.ceil(dim_that_turns(config.yarn_beta_slow)), rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequencies / config.yarn_factor * ramp + frequencies * (1 - ramp)


def attention_scale(config: ModelConfig, head_dim: int) -> float:
    """Factor on query-key products: 1/sqrt(head_dim), times (0.1 m ln s + 1)^2 under YaRN."""
    mscale = 1.0
    if config.yarn_factor > 1.0:
        mscale = 0.1 * config.yarn_mscale * math.log(config.yarn_factor) + 1.0
    return mscale * mscale / math.sqrt(head_dim)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of a rotation for every dim. positions [B, S] int64, frequencies [R/2] -> two [B, S, 1, R].

    The first is the cosine of a dim's angle, the second its sine, negative in the first half. The angles are taken
    in float64, so that long contexts lose nothing; the result is float32 or better.
    """
    angles = (positions.to(torch.float64).unsqueeze(-1) * frequencies.to(positions.device)).unsqueeze(2)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, S, H, R] by the factors of `rotation`; computed in float32 or better, in x's dtype."""
    return _Rotate.apply(x, cos, sin)


def _turned(x: Tensor) -> Tensor:
    """The halves of the last dim exchanged, in new memory."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        wide = x.to(cos.dtype)
        return _turned(wide).mul_(sin).addcmul_(wide, cos).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        wide = grad.to(cos.dtype)
        # the inverse rotation: the sine's sign turned
        return (wide * cos).addcmul_(_turned(wide), sin, value=-1).to(grad.dtype), None, None
