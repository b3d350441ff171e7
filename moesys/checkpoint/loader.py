"""Loading: into tensors that exist, after everything about the checkpoint has been checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from moesys.checkpoint.index import StoredTensor
from moesys.checkpoint.integrity import STATE, DamagedCheckpointError, inspect, verify
from moesys.checkpoint.layout import list_checkpoints
from moesys.checkpoint.ranks import on_every_rank, on_first_rank
from moesys.checkpoint.storage import Reader


def load(path: Path | str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fill the given tensors (name -> same shape and dtype as saved, any device) in place; return the state.

    Raises DamagedCheckpointError, a ValueError, if the checkpoint is not what was written, and ValueError
    with all names that are missing in it, unexpected, or of another shape or dtype; nothing is modified then.
    Where torch.distributed is in use every rank calls it; the layout of DTensors may differ from the save's.
    """
    path = Path(path)
    reason = on_first_rank(lambda: verify(path))
    if reason is not None:
        raise DamagedCheckpointError(
            f"checkpoint {path} is damaged: {reason}; use another one (resuming takes the newest whole one)"
        )
    return _load_verified(path, tensors)


def load_newest(folder: Path | str, tensors: Mapping[str, Tensor]) -> tuple[Path, dict[str, Any], list[str]]:
    """Load the newest whole checkpoint of a folder as `load` does.

    Returns its path, its state, and a message for each damaged one that was skipped. Raises ValueError if
    there is no whole one, or if the newest whole one does not fit the tensors.
    """
    path, skipped = on_first_rank(lambda: _newest_whole(Path(folder)))
    return path, _load_verified(path, tensors), skipped


def read_tensors(
    path: Path | str, *, prefix: str = "", names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names begin with `prefix` (and are among `names`) to the host.

    Only the files with these tensors are read and checked. Raises DamagedCheckpointError, and ValueError if
    a name is not in the checkpoint or none begins with the prefix. Each rank that calls it works alone.
    """
    path = Path(path)
    try:
        stored = inspect(path, lambda name: name.startswith(prefix) and (names is None or name in names))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"checkpoint {path} is damaged: {error}; use another one") from error
    missing = sorted(set(names or ()) - stored.keys())
    if missing or (names is None and not stored):
        what = f"tensors {', '.join(missing)}" if missing else f"tensor whose name begins with {prefix!r}"
        raise ValueError(f"checkpoint {path} has no {what}")
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}
    _fill(path, stored, tensors)
    return tensors


def _newest_whole(folder: Path) -> tuple[Path, list[str]]:
    skipped: list[str] = []
    for path in list_checkpoints(folder):
        reason = verify(path)
        if reason is None:
            return path, skipped
        skipped.append(f"checkpoint {path} is damaged and was skipped: {reason}")
    raise ValueError(
        f"there is no usable checkpoint in {folder}; {'; '.join(skipped) or 'it holds none at all'}. "
        "Start the run anew, or restore its checkpoints from a copy"
    )


def _load_verified(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    def check() -> tuple[dict[str, StoredTensor], dict[str, Any]]:
        stored = inspect(path, hashes=False)
        _compare(path, stored, tensors)
        return stored, json.loads((path / STATE).read_bytes())

    stored, state = on_every_rank(check)
    on_every_rank(lambda: _fill(path, stored, tensors))
    return state


def _compare(path: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    """Account for every name exactly once; ValueError with all that do not match."""
    problems = [f"missing in the checkpoint: {name}" for name in sorted(tensors.keys() - stored.keys())]
    problems += [f"unexpected in the checkpoint: {name}" for name in sorted(stored.keys() - tensors.keys())]
    for name in sorted(stored.keys() & tensors.keys()):
        saved, given = stored[name], tensors[name]
        if saved.shape != tuple(given.shape):
            problems.append(f"{name} has shape {list(saved.shape)} there and {list(given.shape)} here")
        if saved.dtype != given.dtype:
            problems.append(f"{name} has dtype {saved.dtype} there and {given.dtype} here")
        if given.is_meta:
            problems.append(f"{name} is a meta tensor here, which nothing can be loaded into")
    if problems:
        raise ValueError(
            f"checkpoint {path} does not fit this model and optimizer: {'; '.join(problems)}. "
            "Load it with the configuration of the run that wrote it"
        )


def _fill(path: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Each rank reads what it holds from the shared folder; nothing has to be agreed on.
    try:
        dcp.load(dict(tensors), storage_reader=Reader(path, stored), planner=planner, no_dist=True)
    except dcp.CheckpointException as failure:
        raise OSError(f"cannot read checkpoint {path}: {failure}") from failure
