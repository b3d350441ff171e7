"""A trained model from its run folder, for everything that uses one and does not train it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moesys.checkpoint import DamagedCheckpointError, list_checkpoints, read_tensors
from moesys.checkpoint.layout import step_of
from moesys.config import RunConfig
from moesys.configuration import load_saved
from moesys.data import Tokenizer
from moesys.models.config import ModelConfig
from moesys.models.transformer import Transformer
from moesys.training.trainer import DTYPES

_PREFIX = "model/"
_CONTENT = "config.toml, tokenizer.json, metrics.jsonl and checkpoints/"


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """What a run folder gives to use its model."""

    folder: Path
    config: RunConfig
    model: Transformer
    """In evaluation mode, without gradients."""
    tokenizer: Tokenizer
    step: int
    """Optimiser steps that the model has seen."""
    skipped: tuple[str, ...]
    """A message for each newer checkpoint that is damaged and was passed over."""


def load_run(
    folder: Path | str,
    *,
    checkpoint: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LoadedRun:
    """Load a run's model from the checkpoint of a step, by default from the newest whole one.

    dtype is the one that the run computes in unless given; the routers of a bfloat16 model stay in float32, as in
    training. Raises FileNotFoundError where no run folder is, and ValueError for a folder without a usable
    checkpoint, for a step that it does not have, and for a checkpoint that does not hold every tensor of the
    model that config.toml describes exactly once.
    """
    folder = Path(folder)
    _check_folder(folder)
    config = load_saved(folder)
    path, tensors, skipped = _read_model(folder, checkpoint)
    model = _filled(config.model, path, tensors)
    _cast(model, dtype or DTYPES[config.training.precision])
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'} has {tokenizer.vocab_size} entries, the model {config.model.vocab_size}: "
            "it is not this run's tokenizer; put back the file that training wrote"
        )
    return LoadedRun(
        folder=folder,
        config=config,
        model=model.to(device).eval().requires_grad_(False),
        tokenizer=tokenizer,
        step=step_of(path),
        skipped=tuple(skipped),
    )


def choose_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here. ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device cuda: PyTorch finds no GPU here; leave the option out, or give cpu")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def _check_folder(folder: Path) -> None:
    holds = f"a run folder, as `moesys train` writes it, holds {_CONTENT}"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"{folder} {what}; name a run folder: {holds} (by default under runs/ where training was started)"
        )
    missing = [name for name in ("config.toml", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {' and no '.join(missing)}, so it is not a run folder: {holds}")


def _read_model(folder: Path, checkpoint: int | None) -> tuple[Path, dict[str, Tensor], list[str]]:
    """Path of a checkpoint, the model's tensors in it, and messages about damaged ones."""
    paths = list_checkpoints(folder / "checkpoints")
    if not paths:
        raise ValueError(
            f"{folder} has no checkpoint yet; wait until training has written one (every checkpoint.interval steps "
            f"and at the end), or go on with `moesys train --resume {folder}`"
        )
    if checkpoint is not None:
        chosen = [path for path in paths if step_of(path) == checkpoint]
        if not chosen:
            steps = ", ".join(str(step) for step in sorted({step_of(path) for path in paths}))
            raise ValueError(
                f"{folder} has no checkpoint of step {checkpoint}; it has those of step {steps}, "
                "and without a step the newest is taken"
            )
        return chosen[0], read_tensors(chosen[0], prefix=_PREFIX), []
    skipped: list[str] = []
    for path in paths:
        try:
            return path, read_tensors(path, prefix=_PREFIX), skipped
        except DamagedCheckpointError as error:
            skipped.append(f"skipped: {error}")
    raise ValueError(
        f"{folder} has no usable checkpoint; {'; '.join(skipped)}. Restore its checkpoints from a copy"
    )


def _filled(config: ModelConfig, path: Path, tensors: Mapping[str, Tensor]) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    given = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    problems = [f"missing in the checkpoint: {name}" for name in sorted(expected.keys() - given.keys())]
    problems += [f"not in the model: {name}" for name in sorted(given.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(given[name].shape)} in the checkpoint, {list(expected[name].shape)} in the model"
        for name in sorted(given.keys() & expected.keys())
        if given[name].shape != expected[name].shape
    ]
    if problems:
        raise ValueError(
            f"checkpoint {path} does not fit the model in config.toml: {'; '.join(problems)}. "
            "Put back the config.toml that training wrote"
        )
    model.load_state_dict(given, assign=True)
    return model


def _cast(model: Transformer, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        model.to(dtype)
        return
    routers = {id(p) for _, layer in model.moe_layers() for p in layer.router.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in routers:
            parameter.data = parameter.data.to(dtype)
