"""Where a number stopped being finite, and what there is to go back to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesys.checkpoint import list_checkpoints
from moesys.checkpoint.layout import step_of
from moesys.data import Batch
from moesys.training.trainer import Trainer


class DivergedError(ValueError):
    """The loss or the gradient was not finite for too many steps in a row."""


def diverged(folder: Path, step: int, bad_steps: int, where: str) -> DivergedError:
    """The error that ends the run in a folder after bad_steps steps in a row, up to `step`, that were not finite.

    The weights that the first of them met may be what was wrong, so a good checkpoint is one that at least one
    finite step came after.
    """
    first = step - bad_steps + 1
    saved = list_checkpoints(folder / "checkpoints")
    good = [path for path in saved if step_of(path) < first - 1]
    doubtful = [path.name for path in saved if path not in good]
    if good:
        advice = f"the last good checkpoint is {good[0]}"
        if doubtful:
            advice += f" (remove the newer {' and '.join(doubtful)} to go on from it)"
    else:
        advice = "there is no checkpoint from before"
        if doubtful:
            advice += f" (only {' and '.join(doubtful)}, whose weights may be what is wrong: start a new run)"
    return DivergedError(
        f"step {step}: the loss or the gradient was not finite for {bad_steps} steps in a row, now in {where}; "
        f"{advice}. `moesys train --resume {folder}` with a lower --optimizer.lr, a longer --optimizer.warmup-share "
        "or --training.precision float32 usually helps"
    )


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
