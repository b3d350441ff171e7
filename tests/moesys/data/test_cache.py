from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from moesys.data import cache
from moesys.data.cache import TokenWriter, cache_root, cached, read_tokens

TABLE = np.array([0] + [1] * 99, dtype=np.int32)


def write(folder: Path) -> None:
    with TokenWriter(folder / "train", eot_id=0, token_bytes=TABLE) as writer:
        writer.add([1, 2, 3], 3, first=True)
        writer.add([4], 1, first=False)
        writer.add([5], 1, first=True)


def read(folder: Path) -> list[int]:
    return read_tokens(folder / "train").tokens.tolist()


def entries(root: Path) -> list[Path]:
    return list((root / "tokens").iterdir())


def test_what_was_written_is_read(tmp_path):
    write(tmp_path)
    entry = read_tokens(tmp_path / "train")
    assert entry.tokens.tolist() == [0, 1, 2, 3, 4, 0, 5]
    assert entry.offsets.tolist() == [0, 5, 7]
    assert entry.document_bytes.tolist() == [4, 1]
    assert entry.exact_bytes and isinstance(entry.tokens, np.memmap)


def test_byte_counts_that_do_not_add_up_are_noted(tmp_path):
    with TokenWriter(tmp_path / "train", eot_id=0, token_bytes=TABLE) as writer:
        writer.add([1, 2], 2, first=True)
        writer.add([3], 2, first=True)
    assert not read_tokens(tmp_path / "train").exact_bytes


def test_nothing_written_is_an_empty_entry(tmp_path):
    with TokenWriter(tmp_path / "train", eot_id=0, token_bytes=TABLE):
        pass
    entry = read_tokens(tmp_path / "train")
    assert (len(entry.tokens), entry.offsets.tolist(), len(entry.document_bytes)) == (0, [0], 0)


def test_an_entry_is_built_once(tmp_path):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write(folder)

    for _ in range(2):
        assert cached(tmp_path, "tokens", ["key"], build, read) == [0, 1, 2, 3, 4, 0, 5]
    assert len(calls) == 1
    cached(tmp_path, "tokens", ["other key"], build, read)
    assert len(calls) == 2 and len(entries(tmp_path)) == 2


@pytest.mark.timeout(60)
def test_a_process_killed_in_between_leaves_nothing_that_is_used(tmp_path):
    def build_and_die(folder: Path) -> None:
        write(folder)  # even when every file is written: only the rename makes it an entry
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            cached(tmp_path, "tokens", ["key"], build_and_die, read)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    [left] = entries(tmp_path)
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        write(folder)

    assert cached(tmp_path, "tokens", ["key"], build, read) == [0, 1, 2, 3, 4, 0, 5]
    assert built and left in entries(tmp_path)
    # A day later the next build clears the remains away.
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, time.time() - 25 * 3600))
    cached(tmp_path, "tokens", ["second key"], build, read)
    assert left not in entries(tmp_path) and len(entries(tmp_path)) == 2


def test_an_error_in_between_leaves_nothing(tmp_path):
    def build(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "tokens", ["key"], build, read)
    assert entries(tmp_path) == []


def test_two_at_once_do_not_disturb_each_other(tmp_path):
    def build_while_another_finishes(folder: Path) -> None:
        write(folder)
        cached(tmp_path, "tokens", ["key"], write, read)

    assert cached(tmp_path, "tokens", ["key"], build_while_another_finishes, read) == [0, 1, 2, 3, 4, 0, 5]
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "bytes.bin", "entry.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_entry_is_built_again(tmp_path, name, damage):
    cached(tmp_path, "tokens", ["key"], write, read)
    file = entries(tmp_path)[0] / "train" / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    assert cached(tmp_path, "tokens", ["key"], write, read) == [0, 1, 2, 3, 4, 0, 5]
    assert read(entries(tmp_path)[0])


def test_a_full_disk_is_told_with_the_way_out(tmp_path, monkeypatch):
    def full(file) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_sync", full)
    with pytest.raises(
        OSError, match=r"cannot write the cache in .* \(No space left on device\); .*--data\.cache"
    ):
        cached(tmp_path, "tokens", ["key"], write, read)
    assert entries(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write the cache in .*file .*--data\.cache"):
        cached(tmp_path / "file", "tokens", ["key"], write, read)


def test_errors_of_the_source_are_left_as_they_are(tmp_path):
    def build(folder: Path) -> None:
        Path("/nowhere/at/all").read_text()

    with pytest.raises(FileNotFoundError, match="/nowhere/at/all"):
        cached(tmp_path, "tokens", ["key"], build, read)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root("") == tmp_path / ".cache" / "moesys"
    assert cache_root("~/x") == tmp_path / "x"
    assert cache_root(str(tmp_path / "y")) == tmp_path / "y"
