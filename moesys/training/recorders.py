"""TensorBoard and Weights & Biases, beside metrics.jsonl."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from moesys.config import RunConfig


class Recorders:
    """Sends the scalars of every step to whatever the configuration asks for.

    Raises ValueError when Weights & Biases does not start. A TensorBoard file that cannot be written never ends
    a run: metrics.jsonl has the same figures.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._wandb = _start_wandb(config, folder) if config.logging.wandb else None
        self._board = EventFile(folder / "tensorboard") if config.logging.tensorboard else None

    def write(self, row: dict[str, Any]) -> str | None:
        """Record one metrics row; returns a message when TensorBoard's file could not be written."""
        scalars = dict(_scalars(row))
        if self._wandb is not None:
            self._wandb.log(scalars, step=row["step"])
        if self._board is not None:
            try:
                self._board.write(row["step"], scalars)
            except OSError as error:
                self._board = None
                return f"no TensorBoard events from step {row['step']} on: {error.strerror or error}"
        return None

    def close(self) -> None:
        """End the recording."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class EventFile:
    """A TensorBoard event file, begun with the first event: an event a step, with the system before `write` returns.

    What earlier files of the folder hold from that step on no longer counts. torch.utils.tensorboard writes in a
    thread: a killed run would lack its last minutes, and a full disk would end the thread with a traceback.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: Any = None

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append one event with all scalars of a step."""
        if self._records is None:
            self._begin(step)
        self._put(
            step=step,
            summary={"value": [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]},
        )

    def close(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()

    def _begin(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._folder.mkdir(exist_ok=True)
        seconds, fraction = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{fraction}"
        self._records = RecordWriter((self._folder / name).open("wb", buffering=0))
        self._put(file_version="brain.Event:2")
        self._put(step=step, session_log=SessionLog(status=SessionLog.START))

    def _put(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name == "experts":
            for layer, figures in value.items():
                for key in ("max_violation", "entropy", "dropped_share", "dead"):
                    yield f"experts/{key}/layer {layer}", figures[key]
        elif name != "step" and value is not None:
            yield f"{'held-out' if name.startswith('eval_') else 'train'}/{name}", value


def _start_wandb(config: RunConfig, folder: Path) -> Any:
    way_out = "set --logging.no-wandb to go without"
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"logging.wandb needs the wandb package, which is not installed; pip install wandb, or {way_out}"
        ) from error
    # The same in every session of this run, and in no other run.
    identity = blake2b((folder / "environment.json").read_bytes(), digest_size=8).hexdigest()
    try:
        return wandb.init(
            project=config.logging.wandb_project,
            name=folder.name,
            id=identity,
            dir=str(folder),
            resume="allow",
        )
    except Exception as error:  # its own kinds: no login, no network
        raise ValueError(
            f"Weights & Biases did not start: {error}; log in with `wandb login`, or {way_out}"
        ) from error
