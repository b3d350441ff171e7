"""A process that dies at any moment leaves whole checkpoints, and its leftovers are cleared away."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch

from moesys.checkpoint import Checkpointer, list_checkpoints, load_newest, verify
from moesys.checkpoint.layout import step_of
from moesys.testing.checkpoints import DIED, filled, save_and_die, save_forever
from moesys.testing.processes import fork_server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_newest_is_consistent(folder: Path, template: dict[str, torch.Tensor]) -> int:
    path, state, skipped = load_newest(folder, template)
    assert skipped == []
    assert step_of(path) == state["step"]
    for name, tensor in template.items():
        assert tensor.eq(state["step"]).all(), (path, name)
    return state["step"]


@pytest.mark.parametrize(("asynchronous", "kills"), [(False, 4), (True, 8)])
def test_kill_at_random_moments(tmp_path, asynchronous, kills):
    context, rng = fork_server("moesys.testing.checkpoints"), random.Random(11)
    steps, leftovers = [0], 0
    for _ in range(kills):
        process = context.Process(target=save_forever, args=(tmp_path, asynchronous), daemon=True)
        process.start()
        end = time.monotonic() + 30
        while not any(step_of(path) > steps[-1] for path in list_checkpoints(tmp_path)):
            assert process.is_alive() and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        process.join()
        leftovers += any(
            path.name.startswith(".") or path.name.endswith(".new") for path in tmp_path.iterdir()
        )
        steps.append(assert_newest_is_consistent(tmp_path, filled(-1)))
        assert all(verify(path) is None for path in list_checkpoints(tmp_path))
    assert steps == sorted(set(steps)), "each process must go on where the one before was killed"
    assert leftovers > 0, "most kills must fall into the middle of a save"
    Checkpointer(tmp_path, keep=2, asynchronous=asynchronous).close()
    assert all(path.name.startswith("step-") and verify(path) is None for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("existing", "step", "keep"),
    [([], 1, 1), ([1, 2], 3, 1), ([1, 2], 2, 1)],
)
def test_death_before_every_single_change_to_the_file_system(tmp_path, existing, step, keep):
    """Removing, replacing and adding: at no moment is there no whole checkpoint, nor half of one."""
    context = fork_server("moesys.testing.checkpoints")
    first = Checkpointer(tmp_path / "first", keep=5, asynchronous=False)
    for old in existing:
        first.save(old, {"model/w": torch.full((5,), float(old))}, {"step": old})
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first", folder)
        process = context.Process(target=save_and_die, args=(folder, step, keep, moment))
        process.start()
        process.join(60)
        assert process.exitcode in (0, DIED)
        for path in list_checkpoints(folder):
            assert verify(path) is None, (moment, path)
        template = {"model/w": torch.zeros(5)}
        if list_checkpoints(folder) or existing:
            assert assert_newest_is_consistent(folder, template) in (step, max(existing, default=step))
        after = Checkpointer(folder, keep=keep, asynchronous=False)
        assert all(path.name.startswith("step-") and path.suffix == "" for path in folder.iterdir())
        after.save(step, {"model/w": torch.full((5,), float(step))}, {"step": step})
        assert assert_newest_is_consistent(folder, template) == step
        assert len(list(folder.iterdir())) == min(keep, len({*existing, step}))
        if process.exitcode == 0:
            break
    assert moment > 6, "the process must have died at many moments"
    assert process.exitcode == 0


def test_leftovers_of_dead_processes_only(tmp_path):
    process = fork_server("moesys.testing.checkpoints").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    try:
        dead = next(pid for pid in range(4_000_000, 5_000_000) if not psutil.pid_exists(pid))
        for suffix in (
            f"tmp-{dead}",
            f"del-{dead}",
            f"new.del-{dead}",
            f"tmp-{process.pid}",
            f"del-{process.pid}",
        ):
            (tmp_path / f".step-00000001.{suffix}").mkdir()
            (tmp_path / f".step-00000001.{suffix}" / "model-00000.safetensors").write_text("half")
        # The number of a dead process is in use again: its folder is older than the process.
        recycled = tmp_path / f".step-00000002.tmp-{process.pid}"
        recycled.mkdir()
        own = tmp_path / f".step-00000003.tmp-{os.getpid()}"
        own.mkdir()
        for path in (recycled, own):
            os.utime(path, (time.time() - 86_400,) * 2)
        Checkpointer(tmp_path, keep=1, asynchronous=False).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f".step-00000001.del-{process.pid}",
            f".step-00000001.tmp-{process.pid}",
        ]
    finally:
        process.kill()
        process.join()
