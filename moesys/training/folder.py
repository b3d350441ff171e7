"""The run folder: what is in it and how it comes to be."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from moesys.config import RunConfig
from moesys.configuration import to_toml


def create_run_folder(config: RunConfig) -> tuple[Path, RunConfig]:
    """Make the folder for a new run and write config.toml and environment.json; returns the resolved configuration.

    Raises ValueError when config.run_dir holds a run already.
    """
    if config.run_dir:
        folder = Path(config.run_dir)
        if (folder / "config.toml").exists():
            raise ValueError(
                f"run_dir {folder} holds a run already; go on with it by `moesys train --resume {folder}`, "
                "or name another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = _next_free(Path("runs"), config.preset)
    config = replace(config, run_dir=str(folder))
    write_whole(folder / "environment.json", json.dumps(environment(), indent=1) + "\n")
    write_whole(folder / "config.toml", to_toml(config))
    return folder, config


def lock(folder: Path) -> IO[str]:
    """Take the run folder for this process; the lock ends with the process, however it ends.

    Raises ValueError when another process trains in it.
    """
    handle = (folder / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{folder} is in use by another process; wait for it or stop it first") from error
    return handle


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new one, never a part."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
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
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _commit() -> str | None:
    """Commit of the checkout that this package runs from, if it does."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


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
