"""Whole runs of `moesys train` in processes of their own, for tests that kill, stop and compare them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesys import cli
from moesys.checkpoint import list_checkpoints, read_tensors
from moesys.testing import mishaps
from moesys.testing.processes import fork_server

PATIENCE = 120.0
"""Seconds after which a run that should have got somewhere has failed."""
TIMED = ("tokens_per_second", "peak_memory_bytes")
"""Metrics that no two runs share."""

MICRO = {
    "model.vocab-size": 257,
    "model.d-model": 32,
    "model.num-layers": 2,
    "model.num-heads": 2,
    "model.kv-lora-rank": 16,
    "model.qk-nope-head-dim": 8,
    "model.qk-rope-head-dim": 8,
    "model.v-head-dim": 8,
    "model.d-ff": 48,
    "model.num-experts": 4,
    "model.top-k": 2,
    "model.d-expert": 16,
    "data.tokenizer": "bytes",
    "data.held-out": 0.3,
    "training.batch-size": 4,
    "training.micro-batch-size": 4,
    "training.sequence-length": 32,
    "training.steps": 12,
    "training.eval-interval": 5,
    "training.threads": 1,
    "training.device": "cpu",
    "optimizer.lr": 0.01,
    "checkpoint.interval": 4,
    "logging.no-tensorboard": True,
}
"""Options of a run that takes a second."""


def options(folder: Path, **changes: Any) -> list[str]:
    """Command line of a micro run in folder/run on text in folder/text, with changes (`training__steps=3`)."""
    text = folder / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for i in range(10):
            lines = (f"def f{i}_{j}(x):\n    return x + {j}  # größer\n" for j in range(4))
            (text / f"{i}.txt").write_text("".join(lines), encoding="utf-8")
    named: dict[str, Any] = {"run-dir": folder / "run", "data.source": text, "data.cache": folder / "cache"}
    named |= MICRO | {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
    words: list[str] = []
    for name, value in named.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


@dataclass(frozen=True, kw_only=True)
class Session:
    """A `moesys train` in another process, started in milliseconds by forking."""

    process: ForkServerProcess
    log: Path
    """Where its output goes, both streams."""

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Return when the condition holds. AssertionError if the process ends before, or after PATIENCE."""
        end = time.monotonic() + PATIENCE
        while not reached():
            assert self.process.is_alive() and time.monotonic() < end, self.text()
            time.sleep(0.002)

    def end(self) -> int:
        """Wait for the end and return the exit status; negative after a deadly signal."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        assert code is not None, f"still running: {self.text()}"
        return code

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8")


def start(log: Path, arguments: list[str], prepare: Callable[..., None] | None = None, *args: Any) -> Session:
    """Start `moesys train` with these arguments; `prepare(*args)`, importable by name, runs in its process first."""
    context = fork_server(
        __name__, mishaps.__name__, "moesys.training.run", "moesys.train_command", "torch._dynamo"
    )
    log.touch()
    process = context.Process(target=_main, args=(log, arguments, prepare, args), daemon=True)
    process.start()
    return Session(process=process, log=log)


def run(log: Path, arguments: list[str], prepare: Callable[..., None] | None = None, *args: Any) -> int:
    """`start`, and wait for the exit status."""
    return start(log, arguments, prepare, *args).end()


def _main(log: Path, arguments: list[str], prepare: Callable[..., None] | None, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if prepare is not None:
        prepare(*args)
    sys.exit(cli.main(["train", *arguments]))


def command(arguments: list[str], **keywords: Any) -> subprocess.Popen:
    """`python -m moesys train` as a person starts it, with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "moesys", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job ignores it
        **keywords,
    )


def num_rows(folder: Path) -> int:
    """Whole lines in metrics.jsonl."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def rows(folder: Path) -> list[str]:
    """The lines of metrics.jsonl without what no two runs share, as text: equal text is equal bits."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    parsed = (json.loads(line) for line in lines)
    return [json.dumps({name: v for name, v in row.items() if name not in TIMED}) for row in parsed]


def summary(folder: Path) -> dict[str, Any]:
    """summary.json without the time."""
    content = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in content.items() if name != "seconds"}


def final_tensors(folder: Path) -> Mapping[str, Tensor]:
    """Weights, biases and moments of the newest checkpoint."""
    return read_tensors(list_checkpoints(folder / "checkpoints")[0])


def assert_same(folder: Path, reference: Path) -> None:
    """Two finished runs agree to the last bit: metrics, weights, biases, moments, and the final evaluation."""
    found, wanted = rows(folder), rows(reference)
    for mine, other in zip(found, wanted, strict=False):
        assert mine == other
    assert len(found) == len(wanted)
    tensors, others = final_tensors(folder), final_tensors(reference)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert summary(folder) == summary(reference)
