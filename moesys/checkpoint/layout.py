"""Names and moves in the folder of checkpoints.

    step-00000250            a whole checkpoint
    step-00000250.new        a whole one about to take the place of step-00000250
    .step-00000250.tmp-4711  being written by process 4711
    .step-00000250.del-4711  being removed by process 4711

Only renames lead from one state to another, so a process that dies at any moment leaves nothing half-done
under a name without a leading dot.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil

_WHOLE = re.compile(r"step-(\d{8,})(\.new)?")
_HIDDEN = re.compile(r"\.step-\d{8,}(?:\.new)?\.(?:tmp|del)-(\d+)")
_CLOCK_SLACK = 5.0  # seconds by which the start of a process and the time of a file may disagree


def final_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step stands once it is whole."""
    return folder / f"step-{step:08d}"


def temporary_path(folder: Path, step: int) -> Path:
    """Where this process writes the checkpoint of a step."""
    return folder / f".step-{step:08d}.tmp-{os.getpid()}"


def list_checkpoints(folder: Path | str) -> list[Path]:
    """Checkpoints in a folder that bear the name of a whole one, newest first; none if there is no folder.

    The name says that the save was finished; `verify` says whether the content is still what was written.
    """
    found = []
    for path in _entries(Path(folder)):
        match = _WHOLE.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), match[2] is not None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint that `list_checkpoints` gave."""
    match = _WHOLE.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def commit(temporary: Path, final: Path) -> None:
    """Give a whole, synced folder its final name; one that stood there is whole until the new one is."""
    if final.exists():
        new = final.with_name(final.name + ".new")
        _rename(temporary, new)
        finish_replacement(new)
    else:
        _rename(temporary, final)


def finish_replacement(new: Path) -> None:
    """Put `step-N.new` in the place of `step-N`, wherever between the two an earlier attempt stopped."""
    final = new.with_name(new.name.removesuffix(".new"))
    if final.exists():
        discard(final)
    _rename(new, final)


def discard(path: Path) -> None:
    """Remove a checkpoint so that no part of it is ever seen under a whole one's name."""
    doomed = path.with_name(f".{path.name}.del-{os.getpid()}")
    if doomed.exists():
        shutil.rmtree(doomed)
    _rename(path, doomed)
    shutil.rmtree(doomed)


def keep_newest(folder: Path, saved: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to the step just saved.

    Ones of later steps are left alone: the run went back behind them because they are damaged, and they
    must not crowd out good ones.
    """
    older = [path for path in list_checkpoints(folder) if step_of(path) <= step_of(saved)]
    for path in older[keep:]:
        try:
            discard(path)
        except OSError as error:
            text = f"it is whole, but {path.name}, no longer kept, cannot be removed ({error.strerror})"
            raise OSError(error.errno, text) from error


def prepare_folder(folder: Path) -> None:
    """Make the folder if need be, and clear away what killed processes left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _entries(folder):
        match = _HIDDEN.fullmatch(path.name)
        if match and _abandoned(path, int(match[1])):
            shutil.rmtree(path)
    for path in list_checkpoints(folder):
        if path.name.endswith(".new"):
            finish_replacement(path)


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where a folder is or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    # Before anything inside is removed or another name is taken, this one has to be on the disk.
    sync_folder(target.parent)


def _abandoned(path: Path, pid: int) -> bool:
    """Whether the process that wrote a hidden folder is gone, its number perhaps in use by another."""
    try:
        return psutil.Process(pid).create_time() > path.stat().st_mtime + _CLOCK_SLACK
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
