"""The run folder: what is in it and how it comes to be."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from moesys.config import RunConfig
from moesys.configuration import to_toml
from moesys.data import Tokenizer
from moesys.machine import commit

MARKS = ("config.toml", "metrics.jsonl", "checkpoints")
"""A folder with one of these holds a run."""
ELSEWHERE = "name another folder with --run-dir"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def create_run_folder(config: RunConfig, tokenizer: Tokenizer) -> tuple[Path, RunConfig, IO[str]]:
    """Make the folder for a new run, with tokenizer.json, environment.json and, last of all, config.toml.

    Returns the folder, the configuration with run_dir filled in, and the lock (see `lock`). Raises ValueError
    when config.run_dir holds a run already or another process works in it, and OSError when it cannot be
    written; what was made until then is removed.
    """
    named = Path(config.run_dir).expanduser() if config.run_dir else None
    with writing(named or Path("runs"), ELSEWHERE):
        fresh = named is None or not named.exists()
        folder = _next_free(Path("runs"), config.preset) if named is None else named
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder)
    if found := [name for name in MARKS if (folder / name).exists()]:
        raise ValueError(
            f"run_dir {folder} holds a run already ({', '.join(found)}); go on with it by "
            f"`moesys train --resume {folder}`, or {ELSEWHERE}"
        )
    config = replace(config, run_dir=str(folder))
    texts = {
        "tokenizer.json": tokenizer.to_json(),
        "environment.json": json.dumps(environment(), indent=1) + "\n",
        "config.toml": to_toml(config),
    }
    try:
        with writing(folder, ELSEWHERE):
            for name, text in texts.items():
                write_whole(folder / name, text)
    except OSError:
        with suppress(OSError):
            for name in [*texts, *(f".{name}.tmp" for name in texts), ".lock"]:
                (folder / name).unlink(missing_ok=True)
            if fresh:
                folder.rmdir()
        raise
    return folder, config, handle


def lock(folder: Path) -> IO[str]:
    """Take the run folder for this process; the lock ends with the process, however it ends.

    Keep what it returns for as long as the folder is in use. Raises ValueError when another process holds it.
    Where the file system has no locks, nobody is kept out.
    """
    handle = (folder / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder} is in use by another process that trains in it; wait for its end, or stop it first"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return handle


@contextmanager
def writing(path: Path, way_out: str) -> Iterator[None]:
    """Turn the OSError of a write into one that says what could not be written, why, and a way out."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}; {way_out}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new one, never a part, after a power cut too."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def environment() -> dict[str, Any]:
    """Versions, command, commit and machine, as JSON values."""
    packages = {}
    for name in ("moesys", "torch", "triton", "numpy", "tokenizers", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _next_free(parent: Path, preset: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / f"{preset}-{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
