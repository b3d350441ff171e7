"""Whether a checkpoint is what was written: `checksums.json` has size and SHA-256 of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moesys.checkpoint.index import CODES, StoredTensor, decode_index

CHECKSUMS = "checksums.json"
INDEX = "index.json"
STATE = "state.json"


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    bytes: int
    sha256: str


def verify(path: Path | str) -> str | None:
    """Read every byte of a checkpoint; None if all is as it was written, else the reason in words."""
    try:
        inspect(Path(path))
    except DamagedCheckpointError as error:
        return str(error)
    return None


def inspect(
    path: Path, wanted: Callable[[str], bool] = lambda name: True, *, hashes: bool = True
) -> dict[str, StoredTensor]:
    """Check a checkpoint and return the tensors in it whose names are wanted.

    Of the tensor files only those with wanted tensors are read. With hashes=False the content of the tensor
    files is not read at all (another rank has done it), their sizes and headers are. Raises
    DamagedCheckpointError.
    """
    try:
        records = _read_records(path)
        for name in (INDEX, STATE):
            _check_file(path / name, records.get(name), hashes=True)
        index = decode_index((path / INDEX).read_bytes())
        tensors = {name: tensor for name, tensor in index.items() if wanted(name)}
        for file in sorted({part.file for tensor in tensors.values() for part in tensor.parts}):
            _check_file(path / file, records.get(file), hashes=hashes)
        _check_headers(path, tensors)
    except OSError as error:
        raise DamagedCheckpointError(f"it cannot be read: {error}") from error
    except DamagedCheckpointError:
        raise
    except ValueError as error:
        raise DamagedCheckpointError(str(error)) from error
    return tensors


def encode_records(records: Mapping[str, FileRecord]) -> bytes:
    """The content of `checksums.json`."""
    files = {
        name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in sorted(records.items())
    }
    return json.dumps({"files": files}, indent=1).encode()


def _read_records(path: Path) -> dict[str, FileRecord]:
    if not path.is_dir():
        raise DamagedCheckpointError("there is no such folder")
    if not (path / CHECKSUMS).is_file():
        raise DamagedCheckpointError(f"{CHECKSUMS} is missing")
    try:
        files = json.loads((path / CHECKSUMS).read_bytes())["files"]
        if any(Path(name).name != name for name in files):
            raise ValueError("only files of the folder itself")
        return {
            str(name): FileRecord(bytes=entry["bytes"], sha256=entry["sha256"])
            for name, entry in files.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(f"{CHECKSUMS} is malformed ({type(error).__name__})") from error


def _check_file(path: Path, record: FileRecord | None, *, hashes: bool) -> None:
    if record is None:
        raise DamagedCheckpointError(f"{path.name} is not in {CHECKSUMS}")
    if not path.is_file():
        raise DamagedCheckpointError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != record.bytes:
        raise DamagedCheckpointError(f"{path.name} has {size} bytes instead of {record.bytes}")
    if hashes:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != record.sha256:
            raise DamagedCheckpointError(f"the checksum of {path.name} differs")


def _check_headers(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare what the index says with what the files themselves say."""
    by_file: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
    for tensor in tensors.values():
        for part in tensor.parts:
            by_file.setdefault(part.file, []).append((part.key, part.shape, CODES[tensor.dtype]))
    for file, expected in by_file.items():
        try:
            with safe_open(path / file, framework="pt") as stream:
                for key, shape, code in expected:
                    stored = stream.get_slice(key)
                    if tuple(stored.get_shape()) != shape or stored.get_dtype() != code:
                        raise DamagedCheckpointError(f"{file} and {INDEX} disagree about {key!r}")
        except SafetensorError as error:
            raise DamagedCheckpointError(f"{file} is malformed ({error})") from error
