"""Where a number stopped being finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesys.data import Batch
from moesys.training.trainer import Trainer


def locate_nonfinite(trainer: Trainer, batches: Sequence[Batch]) -> str:
    """Name the first weight, layer output or gradient (in this order) that is not finite for these micro-batches."""
    for name, parameter in trainer.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name}"
    for batch in batches:
        if layer := _first_bad_output(trainer.model, batch):
            return f"the output of {layer}"
    for name, gradient in reversed(trainer.weights.gradients().items()):
        if not bool(torch.isfinite(gradient).all()):
            return f"the gradient of {name}"
    return "the sum of the loss"


@torch.no_grad()
def _first_bad_output(model: nn.Module, batch: Batch) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        model(batch.tokens, batch.labels, batch.positions, batch.documents)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
