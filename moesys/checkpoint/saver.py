"""Saving: one call a checkpoint, in the background if wished, whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from moesys.checkpoint.index import CODES
from moesys.checkpoint.layout import final_path, free_bytes, prepare_folder
from moesys.checkpoint.ranks import distributed, on_first_rank
from moesys.checkpoint.storage import Planner, Writer

# Said by torch.distributed.checkpoint at every call in a single process, which is a way we mean to use it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpointer:
    """Saves checkpoints of a run into a folder, `step-00000250` and so on, and keeps the newest `keep`.

    asynchronous=True copies the tensors to the host and writes in a background thread; `save` returns after
    the copy, and an error of the writing is raised by the next `save`, `wait` or `close`. An error leaves
    the earlier checkpoints as they are. Saving a step that exists replaces it.

    Where torch.distributed is in use every rank makes one and calls every method, in the same order; DTensors
    are saved by the ranks that hold their shards, and plain tensors, the same on all ranks, once.

    Raises ValueError for keep < 1, and OSError if the folder cannot be made or cleared of what killed
    processes left in it.
    """

    def __init__(self, folder: Path | str, *, keep: int, asynchronous: bool) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {keep}; 1 keeps only the newest")
        self._folder = Path(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A group of its own: the background thread's exchanges must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if distributed() else None
        on_first_rank(lambda: _prepare(self._folder), self._group)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Save tensors (name -> any shape, strided) and a JSON state as the checkpoint of a step.

        Waits for the save before this one. Raises ValueError for tensors or a state that cannot be stored,
        and one OSError, with path, bytes needed and bytes free, if the disk does not take it.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"the step of a checkpoint must not be negative, got {step}")
        _check_tensors(tensors)
        encoded = _encode_state(state)
        planner = Planner(tensors, copy=self._asynchronous)
        if not self._asynchronous:
            self._write(step, planner, encoded)
            return
        self._thread = threading.Thread(
            target=self._write_later, args=(step, planner, encoded), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more; raise the error of the last save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise the error of a save that has failed in the background by now, without waiting for one under way.

        Where torch.distributed is in use nothing happens: the ranks would not raise at the same step.
        """
        if self._thread is not None and not self._thread.is_alive() and self._group is None:
            self.wait()

    def close(self) -> None:
        """Finish what is being written, as `wait` does; a second call does nothing."""
        try:
            self.wait()
        finally:
            if self._group is not None and distributed():
                dist.destroy_process_group(self._group)
            self._group = None

    def _write_later(self, step: int, planner: Planner, state: bytes) -> None:
        try:
            self._write(step, planner, state)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, planner: Planner, state: bytes) -> None:
        writer = Writer(self._folder, step, state, keep=self._keep)
        try:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
        except (Exception, CheckpointException) as failure:
            cause: BaseException = failure
            if isinstance(failure, CheckpointException):
                cause = next(iter(failure.failures.values()))[0]
            if self._group is None or dist.get_rank() == 0:
                shutil.rmtree(writer.temporary, ignore_errors=True)
            if not isinstance(cause, Exception):
                raise cause from None
            raise _explain(cause, final_path(self._folder, step), writer.needed) from cause


def _prepare(folder: Path) -> None:
    try:
        prepare_folder(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot keep checkpoints in {folder}: {error.strerror} ({error.filename}); "
            "choose another run folder or make this one writable",
        ) from error


def _explain(cause: Exception, path: Path, needed: int | None) -> OSError:
    """The one error that a user sees; its errno is that of the cause."""
    number, reason = errno.EIO, f"{type(cause).__name__}: {cause}"
    if isinstance(cause, OSError) and cause.errno and cause.strerror:
        number, reason = cause.errno, cause.strerror
    size = "" if needed is None else f"{needed:,} bytes are needed and "
    return OSError(
        number,
        f"saving checkpoint {path} failed: {reason}; {size}{free_bytes(path):,} are free. "
        "Earlier checkpoints are as they were: free some space or make the folder writable, "
        "then resume the run",
    )


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    problems = []
    for name, tensor in tensors.items():
        if not name or not name.isprintable() or name == "__metadata__":
            problems.append(f"{name!r} cannot be the name of a tensor")
        if tensor.dtype not in CODES:
            problems.append(f"{name!r} has dtype {tensor.dtype}")
        if tensor.layout != torch.strided or tensor.is_meta:
            problems.append(f"{name!r} is a {'meta' if tensor.is_meta else tensor.layout} tensor")
    if problems:
        raise ValueError(
            f"these tensors cannot be stored: {'; '.join(problems)}. Names are printable, tensors dense and "
            f"of one of the dtypes {', '.join(str(dtype).removeprefix('torch.') for dtype in CODES)}"
        )


def _encode_state(state: dict[str, Any]) -> bytes:
    """State as JSON, refused unless reading it back gives the same."""
    rule = "the state of a checkpoint is plain JSON (string keys, lists, strings, finite numbers, bool, null)"
    try:
        text = json.dumps(state, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{rule}; got {error}") from error
    if json.loads(text) != state:
        raise ValueError(f"{rule}; got something that JSON changes, like a tuple or a number as key")
    return text.encode()
