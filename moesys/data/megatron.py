"""Megatron indexed files (MMapIndexedDataset): PREFIX.bin holds tokens, PREFIX.idx says where they are.

PREFIX.idx, little-endian: 9 bytes "MMIDIDX\\0\\0"; version 1 (uint64); code of the tokens' dtype (uint8);
number of sequences (uint64); length of the document index (uint64); tokens of each sequence (int32); byte
offset of each sequence (int64); document index: the first sequence of each document, and last the number of
sequences (int64).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedFile:
    """An opened pair of files."""

    tokens: np.ndarray
    """All tokens, memory-mapped, in the file's integer dtype."""
    offsets: np.ndarray
    """int64 [documents + 1]: where each document starts in tokens; the last is their number."""


def prefix_of(path: Path) -> Path | None:
    """The prefix of the one pair of files that a path means: prefix, .bin, .idx, or a folder with one."""
    if path.is_dir():
        indices = sorted(path.glob("*.idx"))
        path = indices[0] if len(indices) == 1 else path
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    return path if all(file.is_file() for file in files_of(path)) else None


def files_of(prefix: Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def open_indexed(prefix: Path) -> IndexedFile:
    """Map a pair of files into memory. Raises ValueError naming what is wrong in which file."""
    bin_file, idx_file = files_of(prefix)
    size = idx_file.stat().st_size
    with idx_file.open("rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(
            f"{idx_file} does not start with the mark of a Megatron index (MMIDIDX); check the path"
        )
    _, version, code, num_sequences, num_starts = HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{idx_file} is a Megatron index of version {version}; only version 1 is known")
    if code not in DTYPES:
        raise ValueError(f"{idx_file} has dtype code {code}; tokens are integers, codes {sorted(DTYPES)}")
    needed = HEADER.size + 12 * num_sequences + 8 * num_starts
    if size != needed:
        raise ValueError(
            f"{idx_file} has {size} bytes, {num_sequences} sequences and {num_starts - 1} documents take "
            f"{needed}: it is truncated or damaged; copy it again"
        )
    if num_sequences == 0 or num_starts < 2:
        raise ValueError(f"{idx_file} is empty: no documents in it; check how the files were made")
    raw = np.memmap(idx_file, dtype=np.uint8, mode="r")
    sizes, pointers, starts = _tables(raw, num_sequences)
    tokens = _tokens(bin_file, idx_file, np.dtype(DTYPES[code]).newbyteorder("<"), sizes, pointers)
    if starts[0] != 0 or starts[-1] != num_sequences or np.any(np.diff(starts) < 0):
        raise ValueError(
            f"{idx_file}: its document index does not run from 0 to {num_sequences}; it is damaged"
        )
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    return IndexedFile(tokens=tokens, offsets=np.unique(ends[starts]))


def _tables(raw: np.ndarray, num_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pointers_at = HEADER.size + 4 * num_sequences
    starts_at = pointers_at + 8 * num_sequences
    sizes = raw[HEADER.size : pointers_at].view("<i4")
    return sizes, raw[pointers_at:starts_at].view("<i8"), raw[starts_at:].view("<i8")


def _tokens(
    bin_file: Path, idx_file: Path, dtype: np.dtype, sizes: np.ndarray, pointers: np.ndarray
) -> np.ndarray:
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    if np.any(sizes < 0) or pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        raise ValueError(
            f"{idx_file}: its sequences do not follow one another in {bin_file.name}; build it again"
        )
    size = bin_file.stat().st_size
    if size != ends[-1]:
        raise ValueError(
            f"{bin_file} has {size} bytes, its index {idx_file.name} needs {ends[-1]}: it is truncated, or "
            "the two do not belong together; copy both again"
        )
    if size == 0:
        raise ValueError(f"{bin_file} is empty: no tokens in it; check how the files were made")
    return np.memmap(bin_file, dtype=dtype, mode="r")
