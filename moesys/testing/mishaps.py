"""What can befall a run, brought about inside its process before it starts (`prepare` of moesys.testing.runs)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from moesys.training import loop
from moesys.training.trainer import Trainer


def die_while_saving(step: int, moment: int) -> None:
    """Killed just before the moment-th change that the checkpoint of a step makes to the disk."""
    changes = count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename") and f"step-{step:08d}" in str(args[0]):
            written = event != "open" or args[2] & os.O_CREAT
            if written and next(changes) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def slow_steps(seconds: float) -> None:
    """Every step takes so much longer."""
    train_step = Trainer.train_step

    def slowly(self: Trainer, batches: Sequence[Any]) -> Any:
        time.sleep(seconds)
        return train_step(self, batches)

    setattr(Trainer, "train_step", slowly)  # noqa: B010


def slow_evaluation(seconds: float) -> None:
    """Every batch of an evaluation takes so much longer."""
    evaluate = loop.evaluate

    def slowly(*args: Any, on_batch: Any, **keywords: Any) -> Any:
        def watch(tokens: int) -> None:
            time.sleep(seconds)
            on_batch(tokens)

        return evaluate(*args, on_batch=watch, **keywords)

    setattr(loop, "evaluate", slowly)  # noqa: B010


def poison(module: str, steps: Sequence[int]) -> None:
    """In these steps a module's output is NaN."""
    train_step = Trainer.train_step
    now = -1

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if now in steps else output

    def watched(self: Trainer, batches: Sequence[Any]) -> Any:
        nonlocal now
        if now < 0:
            self.model.get_submodule(module).register_forward_hook(spoil)
        now = self.step + 1
        return train_step(self, batches)

    setattr(Trainer, "train_step", watched)  # noqa: B010


def file_limit(num_bytes: int) -> None:
    """No file may grow beyond this size; a write beyond it fails as on a full disk, with another errno."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def slow_steps_and_file_limit(seconds: float, num_bytes: int) -> None:
    """Both."""
    slow_steps(seconds)
    file_limit(num_bytes)


def no_privileges() -> None:
    """Permissions count for this process even if root runs it: give up all capabilities."""
    version_3, this_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    nothing = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0


def import_from(folder: Path) -> None:
    """Find packages in this folder first."""
    sys.path.insert(0, str(folder))
