"""What tests of checkpoints run in other processes."""

from __future__ import annotations

import errno
import os
import resource
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moesys.checkpoint import Checkpointer, list_checkpoints, load, load_newest, verify
from moesys.checkpoint.layout import step_of

DIED = 77  # exit code of a process that ended itself in the middle of a save


def filled(step: int) -> dict[str, Tensor]:
    """Tensors whose every element tells the step that they belong to."""
    return {
        "model/large": torch.full((300, 1000), float(step)),
        "model/bias": torch.full((7,), step, dtype=torch.float64),
        "optimizer/exp_avg/large": torch.full((300, 1000), float(step)),
        "optimizer/step": torch.tensor(step),
    }


def save_forever(folder: Path, asynchronous: bool) -> None:
    """Save as fast as possible, step after step from the newest on, each step twice, until killed."""
    torch.set_num_threads(1)
    checkpointer = Checkpointer(folder, keep=2, asynchronous=asynchronous)
    newest = list_checkpoints(folder)
    for step in count(step_of(newest[0]) if newest else 1):
        tensors = filled(step)
        for _ in range(2):
            checkpointer.save(step, tensors, {"step": step})
        checkpointer.wait()
        for tensor in tensors.values():
            tensor.fill_(-1)


def save_and_die(folder: Path, step: int, keep: int, moment: int) -> None:
    """Save, and die just before the moment-th change to the file system; exit normally if there are fewer."""
    torch.set_num_threads(1)
    tensors = {"model/w": torch.full((5,), float(step))}
    changes = count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        changed = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        created = event == "open" and str(args[0]).startswith(str(folder)) and args[2] & os.O_CREAT
        if (changed or created) and next(changes) == moment:
            os._exit(DIED)

    sys.addaudithook(hook)
    checkpointer = Checkpointer(folder, keep=keep, asynchronous=False)
    checkpointer.save(step, tensors, {"step": step})
    os._exit(0)


def save_with_file_limit(folder: Path, report: Path) -> None:
    """Save something larger than this process may write, and report the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpointer = Checkpointer(folder, keep=1, asynchronous=True)
    checkpointer.save(2, filled(2), {"step": 2})
    try:
        checkpointer.close()
    except OSError as error:
        report.write_text(f"{error.errno} {error}")


def sharded(*, other_layout: bool = False) -> dict[str, Tensor]:
    """Tensors over two ranks: even, uneven and empty shards, both dims, replicated, and plain ones."""
    whole = sharded_whole()
    mesh = init_device_mesh("cpu", (2,))
    layout = {
        "model/even": Shard(0),
        "model/uneven": Shard(0),
        "model/one_row": Shard(0),
        "model/columns": Shard(1),
        "model/replicated": Replicate(),
        "optimizer/uneven": Shard(0),
    }
    if other_layout:
        layout = {name: Shard(1) if name != "model/replicated" else Shard(0) for name in layout}
    tensors: dict[str, Tensor] = dict(whole)
    for name, placement in layout.items():
        tensors[name] = distribute_tensor(whole[name], mesh, [placement])
    return tensors


def sharded_whole() -> dict[str, Tensor]:
    """The same tensors in one piece."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model/even": torch.randn(4, 3, generator=generator),
        "model/uneven": torch.randn(5, 3, generator=generator, dtype=torch.float64),
        "model/one_row": torch.randn(1, 4, generator=generator).bfloat16(),
        "model/columns": torch.randn(3, 7, generator=generator),
        "model/replicated": torch.randn(6, 2, generator=generator),
        "optimizer/uneven": torch.randn(5, 3, generator=generator),
        "optimizer/step": torch.tensor(12),
        "plain": torch.tensor([True, False]),
    }


def save_sharded(folder: Path, asynchronous: bool) -> None:
    """On two ranks: save sharded tensors twice, changing them right after each call."""
    checkpointer = Checkpointer(folder, keep=2, asynchronous=asynchronous)
    for step in (1, 2):
        tensors = sharded()
        checkpointer.save(step, tensors, {"step": step})
        if asynchronous:
            for tensor in tensors.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    checkpointer.close()


def load_sharded(folder: Path) -> None:
    """On two ranks: load into another layout than the save's, and compare with the whole tensors."""
    tensors = sharded(other_layout=True)
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    path, state, skipped = load_newest(folder, tensors)
    assert (path.name, state, skipped) == ("step-00000002", {"step": 2}, [])
    for name, whole in sharded_whole().items():
        tensor = tensors[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, whole), name


def fail_on_one_rank(folder: Path, failing: int) -> None:
    """On two ranks: the disk of one fails while saving and again in loading; both ranks must learn of it."""
    good = Checkpointer(folder, keep=2, asynchronous=False)
    good.save(1, sharded(), {"step": 1})
    good.close()
    bad = Checkpointer(folder, keep=2, asynchronous=True)
    disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch("os.fsync", side_effect=disk if dist.get_rank() == failing else None):
        bad.save(2, sharded(), {"step": 2})
        try:
            bad.wait()
        except OSError as error:
            assert error.errno == errno.ENOSPC and "step-00000002" in str(error), error
        else:
            raise AssertionError("the save must fail on every rank")
    bad.close()
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert verify(folder / "step-00000001") is None

    tensors = sharded()
    if dist.get_rank() == failing:
        del tensors["plain"]
    try:
        load(folder / "step-00000001", tensors)
    except ValueError as error:
        assert "plain" in str(error), error
    else:
        raise AssertionError("the load must fail on every rank")
