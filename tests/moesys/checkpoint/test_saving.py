"""Retention, replacement, and what happens when the disk does not take it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from moesys.checkpoint import Checkpointer, list_checkpoints, load_newest, verify
from moesys.checkpoint import storage as storage_module
from moesys.testing.checkpoints import filled, save_with_file_limit
from moesys.testing.processes import fork_server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def content(step: int) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((100,), float(step))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_step(folder: Path) -> int:
    targets = content(-1)
    _, state, skipped = load_newest(folder, targets)
    assert not skipped and targets["model/w"].eq(state["step"]).all()
    return state["step"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path, keep, asynchronous):
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=keep, asynchronous=asynchronous)
    for step in (5, 10, 15, 20):
        checkpointer.save(step, content(step), {"step": step})
    checkpointer.close()
    expected = [f"step-{step:08d}" for step in (5, 10, 15, 20)][-keep:]
    assert names(tmp_path / "run" / "checkpoints") == expected
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == expected[::-1]
    assert newest_step(tmp_path / "run" / "checkpoints") == 20


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match=r"keep must be at least 1"):
        Checkpointer(tmp_path, keep=keep, asynchronous=False)


def test_damaged_later_steps_do_not_crowd_out_the_one_just_saved(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False)
    checkpointer.save(30, content(30), {"step": 30})
    (tmp_path / "step-00000030" / "state.json").unlink()
    for step in (10, 20):
        checkpointer.save(step, content(step), {"step": step})
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    checkpointer.save(30, content(30), {"step": 30})
    assert names(tmp_path) == ["step-00000030"] and newest_step(tmp_path) == 30


def test_an_existing_step_is_replaced(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False)
    checkpointer.save(7, content(1), {"step": 1})
    checkpointer.save(7, content(7), {"step": 7})
    assert names(tmp_path) == ["step-00000007"] and newest_step(tmp_path) == 7


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ("notes.txt", "step-1", "best", ".step-00000001.tmp-x", "step-00000001-copy"):
        (tmp_path / name).mkdir()
    for step in (1, 2):
        checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False)
        checkpointer.save(step, content(step), {"step": step})
    assert names(tmp_path) == [
        ".step-00000001.tmp-x", "best", "notes.txt", "step-00000001-copy", "step-00000002", "step-1"
    ]  # fmt: skip


def test_async_save_returns_before_writing_and_waits_for_the_one_before(tmp_path, monkeypatch):
    gate, writes = threading.Event(), []
    real = storage_module._write_tensors

    def slow(path, items, planner):
        writes.append(threading.current_thread() is threading.main_thread())
        assert gate.wait(20)
        return real(path, items, planner)

    monkeypatch.setattr(storage_module, "_write_tensors", slow)
    checkpointer = Checkpointer(tmp_path, keep=2, asynchronous=True)
    checkpointer.save(1, content(1), {"step": 1})
    assert list_checkpoints(tmp_path) == []
    threading.Timer(0.3, gate.set).start()
    start = time.monotonic()
    checkpointer.save(2, content(2), {"step": 2})
    assert time.monotonic() - start > 0.2
    assert [path.name for path in list_checkpoints(tmp_path)][-1] == "step-00000001"
    checkpointer.close()
    checkpointer.close()
    assert newest_step(tmp_path) == 2 and writes == [False, False]


def assert_one_clear_error(error: OSError, number: int, step: int, folder: Path) -> None:
    assert error.errno == number
    text = str(error)
    assert f"saving checkpoint {folder / f'step-{step:08d}'} failed: {os.strerror(number)};" in text
    assert (
        "bytes are needed and" in text
        and "are free" in text
        and "Earlier checkpoints are as they were" in text
    )


@pytest.mark.parametrize("report", ["save", "wait", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_error_in_the_background_is_raised_by_the_next_call_once(tmp_path, monkeypatch, report, number):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=True)
    checkpointer.save(1, content(1), {"step": 1})
    checkpointer.wait()

    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    checkpointer.save(2, content(2), {"step": 2})
    with pytest.raises(OSError) as caught:
        if report == "save":
            checkpointer.save(3, content(3), {"step": 3})
        else:
            getattr(checkpointer, report)()
    assert_one_clear_error(caught.value, number, 2, tmp_path)
    assert names(tmp_path) == ["step-00000001"] and newest_step(tmp_path) == 1
    monkeypatch.undo()
    checkpointer.wait()
    checkpointer.save(4, content(4), {"step": 4})
    checkpointer.close()
    assert newest_step(tmp_path) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_free_space_is_checked_before_anything_is_written(tmp_path, monkeypatch, asynchronous):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=asynchronous)
    checkpointer.save(1, content(1), {"step": 1})
    checkpointer.wait()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 601, 399))
    monkeypatch.setattr(storage_module, "_write_file", lambda *args: pytest.fail("something was written"))
    with pytest.raises(OSError) as caught:
        checkpointer.save(2, content(2), {"step": 2})
        checkpointer.close()
    assert_one_clear_error(caught.value, errno.ENOSPC, 2, tmp_path)
    assert "399 are free" in str(caught.value)  # 100 float32 and the state need more
    assert names(tmp_path) == ["step-00000001"]


def test_a_fault_of_ours_in_the_background_is_an_oserror_too(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=True)

    def broken(*args):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(storage_module, "encode_index", broken)
    checkpointer.save(1, content(1), {})
    with pytest.raises(OSError, match="ZeroDivisionError: oops"):
        checkpointer.wait()
    assert names(tmp_path) == []


def test_interrupt_in_a_synchronous_save_stays_an_interrupt(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(1, content(1), {})
    assert names(tmp_path) == []


def test_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=False)
    checkpointer.save(1, content(1), {"step": 1})

    real = shutil.rmtree

    def denied(path, *args, **kwargs):
        if "step-00000001" in path.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", denied)
    with pytest.raises(OSError, match=r"it is whole, but step-00000001, no longer kept, cannot be removed"):
        checkpointer.save(2, content(2), {"step": 2})
    assert newest_step(tmp_path) == 2


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(OSError, match=r"cannot keep checkpoints in .*choose another run folder"):
            Checkpointer(folder, keep=1, asynchronous=False)


def test_folder_that_vanished(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run", keep=1, asynchronous=True)
    shutil.rmtree(tmp_path / "run")
    checkpointer.save(1, content(1), {})
    with pytest.raises(OSError) as caught:
        checkpointer.close()
    assert_one_clear_error(caught.value, errno.ENOENT, 1, tmp_path / "run")


def test_file_size_limit(tmp_path):
    """A real refusal by the kernel in the middle of a file."""
    folder, report = tmp_path / "checkpoints", tmp_path / "report"
    checkpointer = Checkpointer(folder, keep=1, asynchronous=False)
    checkpointer.save(1, content(1), {"step": 1})
    process = fork_server("moesys.testing.checkpoints").Process(
        target=save_with_file_limit, args=(folder, report)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert report.read_text().startswith(f"{errno.EFBIG} ") and "File too large" in report.read_text()
    assert names(folder) == ["step-00000001"] and newest_step(folder) == 1


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("believed_free", [None, 10**9])
def test_full_disk(small_disk, monkeypatch, believed_free):
    """A disk of 3 MiB takes one checkpoint of 2.4 MB and not a second, foreseen or not."""
    checkpointer = Checkpointer(small_disk, keep=1, asynchronous=True)
    checkpointer.save(1, filled(1), {"step": 1})
    checkpointer.wait()
    if believed_free is not None:
        monkeypatch.setattr(storage_module, "free_bytes", lambda folder: believed_free)
    checkpointer.save(2, filled(2), {"step": 2})
    with pytest.raises(OSError) as caught:
        checkpointer.close()
    assert_one_clear_error(caught.value, errno.ENOSPC, 2, small_disk)
    assert "2,400,0" in str(caught.value)
    assert names(small_disk) == ["step-00000001"]
    assert verify(small_disk / "step-00000001") is None
