"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from moesys.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of optimiser step `step` (1 to steps): linear warm-up to the peak, then config.schedule.

    The warm-up reaches the peak after the share warmup_share of the steps; the decaying schedules reach
    min_lr_ratio at the last step.
    """
    warmup = config.warmup_share * steps
    if step <= warmup:
        return config.lr * step / warmup
    low = config.min_lr_ratio
    done = (step - warmup) / (steps - warmup)
    match config.schedule:
        case "cosine":
            factor = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            factor = 1 - (1 - low) * done
        case "wsd":
            decay_start = 1 - config.decay_share
            share = step / steps
            factor = (
                1.0 if share <= decay_start else 1 - (1 - low) * (share - decay_start) / config.decay_share
            )
        case "step":
            factor = config.step_factor ** sum(
                step / steps > milestone for milestone in config.step_milestones
            )
        case "constant":
            factor = 1.0
    return config.lr * factor
