"""TensorBoard and Weights & Biases."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moesys.testing.mishaps import import_from
from moesys.testing.runs import num_rows, options, run, start
from moesys.training.recorders import EventFile

WANDB = '''
"""A stand-in that writes down what it is told."""
import json

class Run:
    def log(self, scalars, step):
        tell("log", step=step, **scalars)
    def finish(self):
        tell("finish")

def tell(what, **values):
    with open({log!r}, "a") as file:
        file.write(json.dumps([what, values]) + "\\n")

def init(**values):
    {first}
    tell("init", **values)
    return Run()
'''


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard reads: tag to step to value. A step that counts twice is refused."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        assert len(dict(points)) == len(points), points
        found[tag] = dict(points)
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_shows_the_metrics_of_a_killed_run(tmp_path):
    folder = tmp_path / "run"
    arguments = options(tmp_path, logging__no_tensorboard=None)
    session = start(tmp_path / "log", arguments)
    session.wait_for(lambda: num_rows(folder) >= 6)
    session.process.kill()
    session.end()
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    rows, found = metrics(folder), scalars(folder)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    for name in ("loss", "ce_loss", "load_balance_loss", "grad_norm", "lr", "tokens_per_second", "tokens"):
        assert found[f"train/{name}"] == {row["step"]: np.float32(row[name]) for row in rows}
    assert found["held-out/eval_loss"] == {row["step"]: np.float32(row["eval_loss"]) for row in rows[4::5]}
    assert set(found["held-out/eval_bits_per_byte"]) == {5, 10}
    for name in ("max_violation", "entropy", "dropped_share", "dead"):
        wanted = {row["step"]: np.float32(row["experts"]["1"][name]) for row in rows}
        assert found[f"experts/{name}/layer 1"] == wanted


def test_what_is_not_finite_is_no_trouble(tmp_path):
    file = EventFile(tmp_path / "tensorboard")
    for step, value in enumerate((1.0, math.nan, math.inf), 1):
        file.write(step, {"loss": value})
    file.close()
    np.testing.assert_equal(list(scalars(tmp_path)["loss"].values()), [1.0, math.nan, math.inf])


def test_a_run_does_not_end_for_tensorboard(tmp_path):
    arguments = options(tmp_path, logging__no_tensorboard=None)
    assert run(tmp_path / "log", options(tmp_path, training__steps=2)) == 0
    folder = tmp_path / "run"
    (folder / "tensorboard").write_text("a file in the place of the folder")
    assert (
        arguments
        and run(tmp_path / "log", ["--resume", str(folder), "--training.steps", "4", "--logging.tensorboard"])
        == 0
    )
    text = (tmp_path / "log").read_text()
    assert text.count("no TensorBoard events from step 3 on: File exists") == 1 and "Traceback" not in text
    assert num_rows(folder) == 4


def fake_wandb(folder: Path, first: str = "pass") -> Path:
    (folder / "packages" / "wandb").mkdir(parents=True)
    code = WANDB.format(log=str(folder / "told"), first=first)
    (folder / "packages" / "wandb" / "__init__.py").write_text(code)
    return folder / "packages"


def test_weights_and_biases_gets_one_run_for_all_sessions(tmp_path):
    packages, folder = fake_wandb(tmp_path), tmp_path / "run"
    arguments = options(tmp_path, logging__wandb=True, logging__wandb_project="mine", training__steps=6)
    assert run(tmp_path / "log", arguments, import_from, packages) == 0
    again = ["--resume", str(folder), "--training.steps", "8"]
    assert run(tmp_path / "log", again, import_from, packages) == 0
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    first, second = (values for what, values in told if what == "init")
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("mine", "run", "allow")
    assert [values["step"] for what, values in told if what == "log"] == list(range(1, 9))
    logged = {values["step"]: values for what, values in told if what == "log"}
    for row in metrics(folder):
        assert logged[row["step"]]["train/loss"] == row["loss"]
    assert [what for what, _ in told].count("finish") == 2


def test_weights_and_biases_that_does_not_start(tmp_path):
    packages = fake_wandb(tmp_path, first="raise RuntimeError('no API key')")
    assert run(tmp_path / "log", options(tmp_path, logging__wandb=True), import_from, packages) == 2
    text = (tmp_path / "log").read_text()
    assert "Weights & Biases did not start: no API key; log in with `wandb login`" in text
    assert "--logging.no-wandb" in text and "Traceback" not in text


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    file = EventFile(tmp_path / "tensorboard")
    file.write(1, {"loss": 1.0})

    def full(data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file._records, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(2, {"loss": 2.0})
    file.close()
    assert scalars(tmp_path)["loss"] == {1: 1.0}
