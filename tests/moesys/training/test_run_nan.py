"""Steps whose loss or gradient is not finite: one is skipped, too many end the run with a way back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moesys.checkpoint import list_checkpoints, read_tensors
from moesys.testing.mishaps import poison
from moesys.testing.runs import options, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODULE = "blocks.1.feed_forward.shared"


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, refused if it is not strict JSON."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_a_single_bad_step_is_skipped(tmp_path):
    folder = tmp_path / "run"
    arguments = options(tmp_path, checkpoint__interval=1, checkpoint__keep=20, training__steps=8)
    assert run(tmp_path / "log", arguments, poison, MODULE, [6]) == 0
    text = (tmp_path / "log").read_text()
    assert text.count("not finite") == 1
    assert f"step 6: not finite in the output of {MODULE}; the update was skipped" in text
    found = metrics(folder)
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["step"] for row in found if row["loss"] is None or row["grad_norm"] is None] == [6]
    kept = [path.name for path in list_checkpoints(folder / "checkpoints")]
    assert kept == [f"step-{step:08d}" for step in (8, 7, 5, 4, 3, 2, 1)]
    five, seven = (read_tensors(folder / "checkpoints" / f"step-{step:08d}") for step in (5, 7))
    assert {float(seven[name]) for name in seven if name.startswith("optimizer/step/")} == {6.0}
    assert not torch.equal(five["model/embedding"], seven["model/embedding"])
    assert all(math.isfinite(value) for value in json.loads((folder / "summary.json").read_text()).values())


def test_too_many_in_a_row_end_the_run(tmp_path):
    folder = tmp_path / "run"
    arguments = options(tmp_path, checkpoint__interval=1, training__nan_patience=3)
    assert run(tmp_path / "log", arguments, poison, MODULE, [4, 6, 7, 8]) == 2
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert [row["step"] for row in metrics(folder) if row["loss"] is None] == [4, 6, 7, 8]
    checkpoints = folder / "checkpoints"
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-00000005", "step-00000003"]
    message = text[text.index("moesys train: ") :]
    assert message.startswith(
        "moesys train: step 8: the loss or the gradient was not finite for 3 steps in a row, "
        f"now in the output of {MODULE}; the last good checkpoint is {checkpoints}/step-00000003 "
        "(remove the newer step-00000005 to go on from it). "
        f"`moesys train --resume {folder}` with a lower --optimizer.lr"
    )
    assert not (folder / "summary.json").exists()
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert [row["step"] for row in metrics(folder) if row["loss"] is None] == [4]


def test_a_learning_rate_far_too_high(tmp_path):
    """It spoils the weights in a finite step; the checkpoint after that one is not called good."""
    folder = tmp_path / "run"
    assert run(tmp_path / "log", options(tmp_path, training__steps=6, checkpoint__interval=3)) == 0
    again = ["--resume", str(folder), "--training.steps", "12"]
    absurd = ["--optimizer.lr", "1e30", "--checkpoint.interval", "1", "--checkpoint.keep", "9"]
    assert run(tmp_path / "log", [*again, *absurd]) == 2
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    first_bad = next(
        row["step"] for row in metrics(folder) if row["loss"] is None or row["grad_norm"] is None
    )
    assert first_bad >= 8
    assert f"step {first_bad + 2}: the loss or the gradient was not finite for 3 steps in a row" in text
    assert f"the last good checkpoint is {folder}/checkpoints/step-{first_bad - 2:08d} " in text
    newer = folder / "checkpoints" / f"step-{first_bad - 1:08d}"
    assert f"(remove the newer {newer.name} to go on from it)" in text
    for path in newer.iterdir():
        path.unlink()
    newer.rmdir()
    assert run(tmp_path / "log", [*again, "--optimizer.lr", "0.001"]) == 0
    assert [row["step"] for row in metrics(folder)] == list(range(1, 13))
    assert all(row["loss"] is not None for row in metrics(folder))


def test_bad_from_the_start(tmp_path):
    assert run(tmp_path / "log", options(tmp_path, training__nan_patience=1), poison, MODULE, [1]) == 2
    text = (tmp_path / "log").read_text()
    assert "step 1: " in text and "there is no checkpoint from before" in text and "Traceback" not in text
