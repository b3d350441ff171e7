"""TensorBoard and Weights & Biases, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesys.config import RunConfig


class Recorders:
    """Sends the scalars of every step to whatever the configuration asks for."""

    def __init__(self, config: RunConfig, folder: Path, first_step: int) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        if config.logging.wandb:
            self._wandb = _start_wandb(config, folder)

    def write(self, row: dict[str, Any]) -> None:
        """Record one metrics row."""
        scalars = dict(_scalars(row))
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=row["step"])

    def close(self) -> None:
        """Flush and end."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name == "experts":
            for layer, figures in value.items():
                for key in ("max_violation", "entropy", "dropped_share", "dead"):
                    yield f"experts/{key}/layer {layer}", figures[key]
        elif name != "step":
            yield f"{'held-out' if name.startswith('eval_') else 'train'}/{name}", value


def _start_wandb(config: RunConfig, folder: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "logging.wandb needs the wandb package, which is not installed; "
            "pip install wandb, or set --logging.no-wandb"
        ) from error
    return wandb.init(project=config.logging.wandb_project, name=folder.name, dir=str(folder), resume="allow")
