"""A folder of things computed once: tokenizers and tokens, found again by a key of what they came from.

An entry is written beside its place and renamed into it when whole, so that a crash leaves no half entry that
could be used, and two processes that make the same one do not disturb each other. Entries are raw
little-endian arrays and JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import numpy as np

T = TypeVar("T")

VERSION = 1
"""Part of every key: raise it when an entry's content or layout changes."""
ABANDONED_SECONDS = 24 * 3600
"""A scratch folder this old belongs to a process that was killed."""


def cache_root(folder: str) -> Path:
    """data.cache as a path; "" is ~/.cache/moesys."""
    return (Path(folder) if folder else Path("~/.cache/moesys")).expanduser().absolute()


def cached(root: Path, kind: str, key: object, build: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """What `read` gives for the entry of this kind and key, after `build` filled its folder if need be.

    An entry that `read` refuses (ValueError, OSError) is removed and built again. Raises OSError naming the
    folder and the way out when the cache cannot be written.
    """
    name = blake2b(json.dumps([VERSION, kind, key]).encode(), digest_size=16).hexdigest()
    folder = root / kind / name
    if folder.is_dir():
        try:
            return read(folder)
        except (ValueError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
    scratch = folder.with_name(f".{name}.{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
        _sweep(folder.parent)
        build(scratch)
        _move(scratch, folder)
    except OSError as error:
        if error.errno == errno.ENOSPC or str(error.filename or "").startswith(str(root)):
            raise OSError(
                error.errno,
                f"cannot write the cache in {root} ({error.strerror}); free some space or name another "
                "folder with --data.cache",
            ) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read(folder)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEntry:
    """Documents read back from a cache entry, memory-mapped."""

    tokens: np.ndarray
    """uint16 or uint32 [tokens]."""
    offsets: np.ndarray
    """int64 [documents + 1]."""
    document_bytes: np.ndarray
    """int64 [documents]."""
    exact_bytes: bool


class TokenWriter:
    """Writes documents into a new folder as they come; leaving its `with` block makes the folder whole."""

    def __init__(self, folder: Path, *, eot_id: int, token_bytes: np.ndarray) -> None:
        folder.mkdir()
        self._folder = folder
        self._eot_id = eot_id
        self._token_bytes = token_bytes
        self._dtype = np.dtype("<u2" if len(token_bytes) <= 2**16 else "<u4")
        self._files: dict[str, BinaryIO] = {
            name: (folder / f"{name}.bin").open("wb") for name in ("tokens", "offsets", "bytes")
        }
        self._exact = True
        self._num_tokens = self._num_documents = self._document_bytes = 0

    def add(self, ids: Sequence[int], num_bytes: int, *, first: bool) -> None:
        """Tokens of a document or of a part of it, which stand for this many bytes of text."""
        tokens = np.array(ids, dtype=np.int64)
        self._exact &= int(self._token_bytes[tokens].sum()) == num_bytes
        if first:
            self._end_document()
            self._files["offsets"].write(np.array([self._num_tokens], "<i8").tobytes())
            self._num_documents += 1
            tokens = np.concatenate([[self._eot_id], tokens])
        self._files["tokens"].write(tokens.astype(self._dtype).tobytes())
        self._num_tokens += len(tokens)
        self._document_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        for file in self._files.values():
            file.close()

    def _finish(self) -> None:
        self._end_document()
        self._files["offsets"].write(np.array([self._num_tokens], "<i8").tobytes())
        for file in self._files.values():
            _sync(file)
        note = {
            "dtype": self._dtype.str,
            "tokens": self._num_tokens,
            "documents": self._num_documents,
            "exact_bytes": self._exact,
        }
        with (self._folder / "entry.json").open("wb") as file:
            file.write(json.dumps(note).encode())
            _sync(file)

    def _end_document(self) -> None:
        if self._num_documents:
            self._files["bytes"].write(np.array([self._document_bytes], "<i8").tobytes())
        self._document_bytes = 0


def read_tokens(folder: Path) -> TokenEntry:
    """Map what a TokenWriter wrote into memory. Raises ValueError or OSError when it is not whole."""
    note = json.loads((folder / "entry.json").read_text())
    documents = note["documents"]
    return TokenEntry(
        tokens=_mapped(folder / "tokens.bin", note["dtype"], note["tokens"]),
        offsets=_mapped(folder / "offsets.bin", "<i8", documents + 1),
        document_bytes=_mapped(folder / "bytes.bin", "<i8", documents),
        exact_bytes=note["exact_bytes"],
    )


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that goes away at the end, counted in bytes; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def _mapped(file: Path, dtype: str, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    if file.stat().st_size != expected:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, expected {expected}")
    return np.memmap(file, dtype=dtype, mode="r") if count else np.zeros(0, dtype)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _move(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        # Another process finished the same entry first: its content is the same.


def _sweep(parent: Path) -> None:
    """Remove what killed processes left."""
    for folder in parent.glob(".*.*"):
        with suppress(FileNotFoundError):  # its own process may be done with it by now
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
