"""A run killed at any moment, again and again, ends as one that was never stopped, to the last bit."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from moesys.checkpoint import list_checkpoints, verify
from moesys.testing.mishaps import die_while_saving
from moesys.testing.runs import assert_same, command, num_rows, options, run, start

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VARIANTS = {
    "accumulation, mtp, saved in the background": {
        "training__micro_batch_size": 2,
        "model__mtp_depth": 1,
        "balance__loss_scope": "batch",
        "balance__loss_coef": 0.01,
        "balance__z_loss_coef": 0.001,
        "checkpoint__asynchronous": True,
    },
    "bfloat16, saved at once": {
        "training__precision": "bfloat16",
        "checkpoint__no_asynchronous": True,
        "optimizer__schedule": "wsd",
    },
}
STEPS = 26


def samples_per_epoch(folder: Path) -> int:
    """From the sizes that the run printed: whole windows of 32 tokens and a label."""
    state = json.loads((list_checkpoints(folder / "run/checkpoints")[0] / "state.json").read_text())
    found = re.search(r"([\d,]+) tokens to train on", state["data"])
    assert found is not None
    return (int(found[1].replace(",", "")) - 1) // 32


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_again_and_again(tmp_path, variant):
    fields = {**VARIANTS[variant], "training__steps": STEPS, "checkpoint__interval": 1}
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert run(tmp_path / "log", options(reference, **fields)) == 0
    boundary, rest = divmod(samples_per_epoch(reference), 4)
    assert 7 < boundary < STEPS - 9 and rest, "an epoch begins within the run, and within a batch"

    rng, folder, arguments = random.Random(variant), killed / "run", options(killed, **fields)
    # before which step's end, and in its save (before which change to the disk) or at any moment (None)
    moments = [
        (1, None),
        (3, 7),
        (4, 3),
        (boundary, None),
        (boundary + 1, 1),
        (boundary + 3, None),
        (STEPS - 4, 6),
    ]
    for step, moment in moments:
        if moment is None:
            session = start(tmp_path / "log", arguments)
            session.wait_for(lambda: num_rows(folder) >= step)  # noqa: B023
            time.sleep(rng.uniform(0, 0.03))
            session.process.kill()
        else:
            session = start(tmp_path / "log", arguments, die_while_saving, step, moment)
        assert session.end() == -signal.SIGKILL
        assert step <= num_rows(folder) < STEPS
        assert all(verify(path) is None for path in list_checkpoints(folder / "checkpoints"))
        arguments = ["--resume", str(folder)]
    assert run(tmp_path / "log", arguments) == 0
    assert_same(folder, reference / "run")
    kept = [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept


def test_the_command_of_a_person(tmp_path):
    assert run(tmp_path / "log", options(tmp_path / "reference", training__steps=40)) == 0
    folder = tmp_path / "killed" / "run"
    process = command(options(tmp_path / "killed", training__steps=40))
    end = time.monotonic() + 60
    while not list_checkpoints(folder / "checkpoints"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)
    process.kill()
    process.communicate()
    resumed = command(["--resume", str(folder)])
    text, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, text
    assert f"resuming from {folder}/checkpoints/step-" in text
    assert_same(folder, tmp_path / "reference" / "run")
