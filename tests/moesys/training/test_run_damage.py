"""Damaged checkpoints and metrics, a disk that takes no more, folders that cannot be written or are in use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesys.checkpoint import list_checkpoints, verify
from moesys.testing.mishaps import file_limit, no_privileges, slow_steps, slow_steps_and_file_limit
from moesys.testing.runs import assert_same, num_rows, options, rows, run, start

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with the checkpoints 4, 8 and 12; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    assert run(folder / "log", options(folder, checkpoint__keep=3)) == 0
    return folder / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model-00000.safetensors", 5000)


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / "optimizer-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)


def lose_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def leave_nothing(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


DAMAGES = {
    truncate: "model-00000.safetensors has 5000 bytes instead of",
    flip_a_bit: "the checksum of optimizer-00000.safetensors differs",
    lose_the_state: "state.json is missing",
    leave_nothing: "checksums.json is missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, finished, copy, damage):
    checkpoints = copy / "checkpoints"
    damage(checkpoints / "step-00000012")
    assert run(tmp_path / "log", ["--resume", str(copy)]) == 0
    text = (tmp_path / "log").read_text()
    assert f"checkpoint {checkpoints}/step-00000012 is damaged and was skipped: {DAMAGES[damage]}" in text
    assert f"resuming from {checkpoints}/step-00000008\n" in text
    assert_same(copy, finished)
    assert [verify(path) for path in list_checkpoints(checkpoints)] == [None] * 3


def test_two_damaged_ones_and_half_a_line(tmp_path, finished, copy):
    truncate(copy / "checkpoints" / "step-00000012")
    lose_the_state(copy / "checkpoints" / "step-00000008")
    metrics = copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:10]) + lines[10][:50])
    assert run(tmp_path / "log", ["--resume", str(copy)]) == 0
    assert "resuming from" in (tmp_path / "log").read_text()
    assert_same(copy, finished)


def test_all_damaged(tmp_path, copy):
    for path in list_checkpoints(copy / "checkpoints"):
        truncate(path)
    before = rows(copy)
    assert run(tmp_path / "log", ["--resume", str(copy)]) == 2
    text = (tmp_path / "log").read_text()
    assert text.startswith(f"moesys train: there is no usable checkpoint in {copy}/checkpoints; ")
    assert all(f"step-{step:08d} is damaged" in text for step in (4, 8, 12))
    assert "Start the run anew, or restore its checkpoints from a copy" in text and "Traceback" not in text
    assert rows(copy) == before


def test_none_written_yet(tmp_path, finished, copy):
    shutil.rmtree(copy / "checkpoints")
    assert run(tmp_path / "log", ["--resume", str(copy)]) == 0
    assert f"{copy} has no checkpoint yet: starting from step 0" in (tmp_path / "log").read_text()
    assert_same(copy, finished)


def one_message(log: Path, *parts: str) -> None:
    """The run's last words are one message with these parts, and nothing of Python."""
    text = log.read_text()
    assert "Traceback" not in text and "Exception" not in text, text
    message = text[text.index("moesys train: ") :]
    assert message.count("\n") == 1 and "Errno" not in message, message
    for part in parts:
        assert part in message, message


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mounts a disk of so many bytes, or changes its size."""
    mounted: list[Path] = []

    def mount(folder: Path, size: int) -> None:
        again = ["-o", f"remount,size={size}"] if folder in mounted else ["-o", f"size={size}"]
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *again, "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting needs root")
        if folder not in mounted:
            mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk(tmp_path, finished, small_disk, asynchronous):
    disk = tmp_path / "disk"
    size = sum(file.stat().st_size for file in list_checkpoints(finished / "checkpoints")[0].iterdir())
    small_disk(disk, 2 * size)
    fields = {"run_dir": disk / "run", "checkpoint__keep": 3}
    if not asynchronous:
        fields["checkpoint__no_asynchronous"] = True
    assert run(tmp_path / "log", options(tmp_path, **fields)) == 2
    one_message(
        tmp_path / "log",
        f"saving checkpoint {disk}/run/checkpoints/step-00000008 failed: No space left on device",
        "bytes are needed and",
        "Earlier checkpoints are as they were",
        "resume the run",
    )
    saved = list_checkpoints(disk / "run" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000004"] and verify(saved[0]) is None
    small_disk(disk, 8 * size)
    assert run(tmp_path / "log", ["--resume", str(disk / "run")]) == 0
    assert_same(disk / "run", finished)


def test_a_checkpoint_that_the_system_refuses(tmp_path, finished):
    """For machines where nothing can be mounted: a limit on the size of a file."""
    arguments = options(tmp_path)
    assert run(tmp_path / "log", arguments, file_limit, 50_000) == 2
    one_message(tmp_path / "log", "step-00000004 failed: File too large", "resume the run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert run(tmp_path / "log", ["--resume", str(tmp_path / "run")]) == 0
    assert_same(tmp_path / "run", finished)


def test_a_save_that_fails_in_the_background_ends_the_run_soon(tmp_path):
    arguments = options(tmp_path, training__steps=40, checkpoint__interval=10)
    assert run(tmp_path / "log", arguments, slow_steps_and_file_limit, 0.1, 50_000) == 2
    one_message(tmp_path / "log", "saving checkpoint", "step-00000010 failed: File too large")
    assert 10 <= num_rows(tmp_path / "run") < 18


def test_metrics_that_cannot_be_written(tmp_path, finished):
    folder = tmp_path / "run"
    arguments = options(tmp_path, checkpoint__interval=0)
    assert run(tmp_path / "log", arguments, file_limit, 3500) == 2
    one_message(
        tmp_path / "log",
        f"cannot write {folder}/metrics.jsonl: File too large; free some space",
        f"moesys train --resume {folder}",
    )
    assert 3 < num_rows(folder) < 10
    assert run(tmp_path / "log", ["--resume", str(folder)]) == 0
    assert_same(folder, finished)


def test_a_folder_that_cannot_be_written(tmp_path, copy):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    arguments = options(tmp_path)
    assert run(tmp_path / "log", [*arguments, "--run-dir", str(closed / "run")], no_privileges) == 2
    one_message(
        tmp_path / "log", f"cannot write {closed}/run: Permission denied; name another folder with --run-dir"
    )
    assert run(tmp_path / "log", [*arguments, "--run-dir", str(closed)], no_privileges) == 2
    one_message(
        tmp_path / "log", f"cannot write {closed}: Permission denied; name another folder with --run-dir"
    )
    assert list(closed.iterdir()) == []
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir(mode=0o500)
    assert run(tmp_path / "log", [*arguments, "--run-dir", str(tmp_path / "other")], no_privileges) == 2
    one_message(
        tmp_path / "log", f"cannot write the cache in {tmp_path}/cache (Permission denied)", "--data.cache"
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "cannot write {run}: Permission denied; make it writable, or go on with a copy of it"),
        ("checkpoints", "cannot keep checkpoints in {run}/checkpoints: Permission denied"),
        ("metrics.jsonl", "cannot write {run}/metrics.jsonl: Permission denied; free some space or make it"),
    ],
)
def test_a_run_that_cannot_be_written_any_more(tmp_path, finished, copy, name, message):
    (copy / ".lock").unlink()
    mode = (copy / name).stat().st_mode
    (copy / name).chmod(mode & ~0o222)
    if name == "checkpoints":  # something must need removing for Checkpointer to notice before the first save
        (copy / "checkpoints" / ".step-00000012.tmp-999999").mkdir(exist_ok=True)
    arguments = ["--resume", str(copy), "--training.steps", "16"]
    assert run(tmp_path / "log", arguments, no_privileges) == 2
    one_message(tmp_path / "log", message.format(run=copy))
    (copy / name).chmod(mode)
    assert run(tmp_path / "log", ["--resume", str(copy)]) == 0


def test_a_folder_with_a_run_is_left_alone(tmp_path, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"}
    assert run(tmp_path / "log", options(tmp_path)) == 2
    one_message(
        tmp_path / "log",
        f"run_dir {copy} holds a run already (config.toml, metrics.jsonl, checkpoints)",
        f"`moesys train --resume {copy}`",
    )
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"} == before


def test_a_run_in_use_by_another_process(tmp_path, finished):
    folder = tmp_path / "run"
    session = start(tmp_path / "first", options(tmp_path), slow_steps, 0.15)
    session.wait_for(lambda: num_rows(folder) > 1)
    for arguments in (["--resume", str(folder)], options(tmp_path)):
        assert run(tmp_path / "second", arguments) == 2
        one_message(tmp_path / "second", f"{folder} is in use by another process")
    assert session.process.is_alive()
    assert session.end() == 0
    assert_same(folder, finished)
