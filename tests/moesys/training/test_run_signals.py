"""SIGTERM and Ctrl-C: an orderly end within a step, from which the run goes on as if it had not been stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moesys.checkpoint import list_checkpoints
from moesys.testing.mishaps import slow_evaluation, slow_steps
from moesys.testing.runs import assert_same, command, num_rows, options, run, start
from moesys.training.signals import StopSignals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("reference")
    assert run(folder / "log", options(folder)) == 0
    return folder / "run"


def newest(folder: Path) -> tuple[str, dict[str, Any]]:
    """Name and state of the newest checkpoint."""
    path = list_checkpoints(folder / "checkpoints")[0]
    return path.name, json.loads((path / "state.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_end(tmp_path, reference, number):
    folder = tmp_path / "run"
    session = start(tmp_path / "log", options(tmp_path, checkpoint__interval=0), slow_steps, 0.3)
    session.wait_for(lambda: num_rows(folder) >= 6)
    session.signal(number)
    if number == signal.SIGTERM:
        session.signal(number)  # launchers send it more than once
    done = num_rows(folder)
    assert session.end() == 0
    assert done <= num_rows(folder) <= done + 1
    step = num_rows(folder)
    assert newest(folder)[0] == f"step-{step:08d}"
    name = signal.Signals(number).name
    assert f"{name}: stopping after this step and saving" in session.text()
    assert f"stopped by {name} after step {step}; everything is saved" in session.text()
    assert f"moesys train --resume {folder}\n" in session.text()
    assert not (folder / "summary.json").exists()
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert_same(folder, reference)


def test_a_second_interrupt_ends_at_once(tmp_path):
    """In steps of many seconds, as a person does it, at a moment when nothing was saved yet."""
    folder = tmp_path / "run"
    changes = {"training__batch_size": 2**16, "training__micro_batch_size": 64}
    process = command(options(tmp_path, **changes))
    end = time.monotonic() + 60
    while not (folder / "checkpoints").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    text, _ = process.communicate(timeout=10)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    assert "(Ctrl-C again ends at once)" in text and "ended at once" in text and "Traceback" not in text


def test_a_signal_during_an_evaluation_loses_nothing(tmp_path, reference):
    """Twice in the evaluation after step 5: its metrics wait in the checkpoint until it can be done."""
    folder = tmp_path / "run"
    arguments = options(tmp_path, checkpoint__interval=0)
    for attempt in range(2):
        session = start(tmp_path / f"log-{attempt}", arguments, slow_evaluation, 0.5)
        session.wait_for(lambda: (folder / "metrics.jsonl").exists() and num_rows(folder) == 4)
        session.wait_for(lambda: "device" in session.text())  # noqa: B023  of this session: it has begun
        time.sleep(0.8)
        assert num_rows(folder) == 4
        session.signal(signal.SIGTERM)
        assert session.end() == 0
        assert "after step 5; everything is saved" in session.text()
        assert num_rows(folder) == 4
        name, state = newest(folder)
        assert name == "step-00000005" and state["pending"]["step"] == 5
        arguments = ["--resume", str(folder)]
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert_same(folder, reference)


def test_a_signal_during_the_last_evaluation(tmp_path, reference):
    folder = tmp_path / "run"
    session = start(tmp_path / "log", options(tmp_path, training__eval_interval=0), slow_evaluation, 0.5)
    session.wait_for(lambda: (folder / "checkpoints" / "step-00000012").exists())
    session.signal(signal.SIGTERM)
    assert session.end() == 0
    assert "after step 12; everything is saved" in session.text()
    assert not (folder / "summary.json").exists()
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["eval_loss"] == pytest.approx(
        json.loads((reference / "summary.json").read_text())["eval_loss"], abs=0
    )


def test_ignored_signals_stay_ignored_and_handlers_come_back():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert stop.received is signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_take_no_signals():
    found = []

    def enter() -> None:
        with StopSignals() as stop:
            found.append(stop.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [None]
