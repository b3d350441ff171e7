"""How a run folder comes to be, and how it does not."""

from __future__ import annotations

import errno
import fcntl
import json
import os

import pytest

from moesys.config import RunConfig
from moesys.configuration import load_saved
from moesys.data import Tokenizer, bytes_tokenizer
from moesys.training import folder as module
from moesys.training.folder import create_run_folder, lock, write_whole


def test_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-deepseek-002").mkdir(parents=True)
    names = [create_run_folder(RunConfig(), bytes_tokenizer())[0].as_posix() for _ in range(2)]
    assert names == ["runs/tiny-deepseek-001", "runs/tiny-deepseek-003"]


def test_what_is_in_it(tmp_path):
    config = RunConfig(run_dir=str(tmp_path / "deep" / "run"))
    folder, config, handle = create_run_folder(config, bytes_tokenizer())
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "config.toml",
        "environment.json",
        "tokenizer.json",
    ]
    assert load_saved(folder) == config
    assert Tokenizer.load(folder / "tokenizer.json").vocab_size == 257
    environment = json.loads((folder / "environment.json").read_text())
    assert {"started", "command", "python", "packages", "commit", "threads"} <= environment.keys()
    assert "torch" in environment["packages"]
    with pytest.raises(ValueError, match="in use by another process"):
        lock(folder)
    handle.close()
    lock(folder).close()


def test_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder, config, _ = create_run_folder(RunConfig(run_dir="~/run"), bytes_tokenizer())
    assert folder == tmp_path / "run" and config.run_dir == str(folder)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "environment.json", "config.toml"])
def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch, exists, name):
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")

    def full(path, text):
        if path.name == name:
            path.with_name(f".{path.name}.tmp").write_text(text[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, text)

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(OSError, match=r"cannot write .*/run: No space left on device; name another folder"):
        create_run_folder(RunConfig(run_dir=str(folder)), bytes_tokenizer())
    assert [path.name for path in tmp_path.rglob("*")] == (["run", "notes.txt"] if exists else [])


@pytest.mark.parametrize("mark", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_a_run_is_never_overwritten(tmp_path, mark):
    (tmp_path / mark).mkdir()
    with pytest.raises(ValueError, match=rf"holds a run already \({mark}\)"):
        create_run_folder(RunConfig(run_dir=str(tmp_path)), bytes_tokenizer())
    assert {path.name for path in tmp_path.iterdir()} == {mark, ".lock"}


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(
        OSError, match=r"cannot write .*/run: File exists; name another folder with --run-dir"
    ):
        create_run_folder(RunConfig(run_dir=str(tmp_path / "run")), bytes_tokenizer())


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock(tmp_path).close()
