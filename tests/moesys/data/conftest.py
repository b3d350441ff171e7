from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moesys.config import DataConfig
from moesys.data import Data, TokenDataset, open_data

EOT = 0


@pytest.fixture
def stream_of() -> Callable[[list[list[int]]], TokenDataset]:
    """A dataset in memory: one list of ids a document, end-of-text (id 0) put before each, one byte a token."""

    def make(documents: list[list[int]]) -> TokenDataset:
        laid_out = [[EOT, *ids] for ids in documents]
        return TokenDataset(
            name="memory",
            tokens=np.array([token for ids in laid_out for token in ids], dtype=np.uint16),
            offsets=np.cumsum([0, *map(len, laid_out)]),
            eot_id=EOT,
            token_bytes=np.array([0] + [1] * 999, dtype=np.int32),
            document_bytes=np.array([len(ids) for ids in documents], dtype=np.int64),
            exact_bytes=True,
        )

    return make


@pytest.fixture
def open_source(tmp_path: Path) -> Callable[..., Data]:
    """open_data with a cache under tmp_path, byte tokens and short sequences unless told otherwise."""

    def make(source: Path | str, *, vocab_size: int = 300, sequence_length: int = 8, **fields) -> Data:
        fields = {"tokenizer": "bytes", "held_out": 0.3, "cache": str(tmp_path / "cache"), **fields}
        config = DataConfig(source=str(source), **fields)
        return open_data(config, vocab_size=vocab_size, sequence_length=sequence_length, seed=0)

    return make


@pytest.fixture
def write_megatron() -> Callable[..., Path]:
    """Writes PREFIX.bin and PREFIX.idx byte by byte from the description of the format."""

    def write(
        prefix: Path, documents: list[list[list[int]]], *, code: int = 8, letter: str = "H", size: int = 2
    ) -> Path:
        sequences = [ids for document in documents for ids in document]
        first = [0]
        for document in documents:
            first.append(first[-1] + len(document))
        lengths = [len(ids) for ids in sequences]
        pointers = [size * sum(lengths[:k]) for k in range(len(lengths))]
        flat = [token for ids in sequences for token in ids]
        prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
        prefix.with_name(prefix.name + ".idx").write_bytes(
            b"MMIDIDX\x00\x00"
            + struct.pack("<Q", 1)
            + struct.pack("<B", code)
            + struct.pack("<Q", len(sequences))
            + struct.pack("<Q", len(first))
            + struct.pack(f"<{len(lengths)}i", *lengths)
            + struct.pack(f"<{len(pointers)}q", *pointers)
            + struct.pack(f"<{len(first)}q", *first)
        )
        return prefix

    return write
