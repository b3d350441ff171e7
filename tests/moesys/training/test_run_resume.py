"""Runs that go on with another end or another schedule, and errors before anything has begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesys.config import OptimizerConfig
from moesys.configuration import load_saved
from moesys.testing.mishaps import slow_steps
from moesys.testing.runs import assert_same, num_rows, options, rows, run, start, summary
from moesys.training.schedule import learning_rate

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONSTANT = {"optimizer__schedule": "constant", "optimizer__warmup_share": 0}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows(folder)]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps with a constant learning rate; not to be changed."""
    folder = tmp_path_factory.mktemp("twelve")
    assert run(folder / "log", options(folder, **CONSTANT)) == 0
    return folder / "run"


def test_a_longer_run_is_the_same_as_one_that_was_to_be_as_long(tmp_path, twelve):
    folder = tmp_path / "run"
    assert run(tmp_path / "log", options(tmp_path, **CONSTANT, training__steps=6)) == 0
    assert f"moesys train --resume {folder} --training.steps 12" in (tmp_path / "log").read_text()
    session = start(tmp_path / "log", ["--resume", str(folder), "--training.steps", "12"], slow_steps, 0.2)
    session.wait_for(lambda: num_rows(folder) > 8)
    session.process.kill()
    session.end()
    assert not (folder / "summary.json").exists(), "the old end says nothing about the new one"
    assert load_saved(folder).training.steps == 12, "the new end is part of the run"
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert_same(folder, twelve)


def test_a_finished_run_is_only_evaluated_again(tmp_path):
    folder = tmp_path / "run"
    assert run(tmp_path / "log", options(tmp_path)) == 0
    before, found = (folder / "metrics.jsonl").read_bytes(), summary(folder)
    (folder / "summary.json").unlink()
    times = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
    assert run(tmp_path / "log", ["--resume", str(folder / "config.toml")]) == 0
    assert summary(folder) == found
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")} == times


def test_another_schedule_and_batch_size(tmp_path):
    folder = tmp_path / "run"
    assert run(tmp_path / "log", options(tmp_path)) == 0
    changed = ["--optimizer.schedule", "linear", "--optimizer.lr", "0.003", "--training.batch-size", "8"]
    assert run(tmp_path / "log", ["--resume", str(folder), "--training.steps", "16", *changed]) == 0
    wanted = OptimizerConfig(schedule="linear", lr=0.003)
    found = metrics(folder)[12:]
    assert [row["lr"] for row in found] == [learning_rate(wanted, step, 16) for step in range(13, 17)]
    assert [row["tokens"] for row in found] == [12 * 128 + k * 256 for k in range(1, 5)]
    state = json.loads((folder / "checkpoints" / "step-00000016" / "state.json").read_text())
    assert state["samples"] == 12 * 4 + 4 * 8, "the next batch starts where the last one ended"


def test_an_end_that_lies_behind(tmp_path):
    folder = tmp_path / "run"
    assert run(tmp_path / "log", options(tmp_path)) == 0
    assert run(tmp_path / "log", ["--resume", str(folder), "--training.steps", "5"]) == 2
    text = (tmp_path / "log").read_text()
    assert "training.steps = 5" in text and "step-00000012 has 12 steps behind it" in text
    assert load_saved(folder).training.steps == 12 and num_rows(folder) == 12


def test_changed_text_is_told(tmp_path):
    assert run(tmp_path / "log", options(tmp_path)) == 0
    (tmp_path / "text" / "0.txt").write_text("shorter")
    assert run(tmp_path / "log", ["--resume", str(tmp_path / "run"), "--training.steps", "13"]) == 0
    assert "the text is not what it was before: " in (tmp_path / "log").read_text()


def test_a_run_needs_no_tokenizer_but_its_own(tmp_path):
    assert run(tmp_path / "log", options(tmp_path)) == 0
    given = tmp_path / "given.json"
    (tmp_path / "run" / "tokenizer.json").rename(given)
    folder = tmp_path / "second"
    assert (
        run(tmp_path / "log", [*options(tmp_path), "--run-dir", str(folder), "--data.tokenizer", str(given)])
        == 0
    )
    given.unlink()
    assert run(tmp_path / "log", ["--resume", str(folder), "--training.steps", "13"]) == 0
    assert num_rows(folder) == 13


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "nowhere"}, "there is no such file or folder"),
        ({"data__held_out": 0.0001}, "both need at least 1"),
        ({"training__sequence_length": 100_000}, "give more text or a shorter sequence"),
        ({"data__tokenizer": "{folder}/text/0.txt"}, "is not a tokenizer.json"),
        ({"model__vocab_size": 256}, "set model.vocab_size to 257"),
        ({"model__top_k": 9}, "only 4 experts"),
        ({"logging__wandb": True}, "the wandb package is not installed; run `pip install wandb`"),
    ],
)
def test_an_early_error_leaves_no_folder(tmp_path, changes, message):
    arguments = options(tmp_path, **changes)
    words = [word.replace("{folder}", str(tmp_path)) for word in arguments]
    assert run(tmp_path / "log", words) == 2
    text = (tmp_path / "log").read_text()
    assert message in text and "Traceback" not in text
    assert not (tmp_path / "run").exists()
