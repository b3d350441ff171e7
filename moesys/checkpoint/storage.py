"""Storage for torch.distributed.checkpoint: tensors in safetensors files, everything else in JSON.

PyTorch's own storages do not serve here: the file system one unpickles its metadata, and the Hugging Face
one builds each file in memory, refuses tied or transposed tensors, and loses one of two parts of a tensor
that stand on the same rank.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from moesys.checkpoint.index import CODES, Part, StoredTensor, encode_index, part_key
from moesys.checkpoint.integrity import CHECKSUMS, INDEX, STATE, FileRecord, encode_records
from moesys.checkpoint.layout import (
    commit,
    final_path,
    free_bytes,
    keep_newest,
    sync_folder,
    temporary_path,
)

_SLICE = 4 << 20  # bytes hashed and written at a time, so that they are still in the cache for the second


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What a rank tells rank 0 about a part that it has written."""

    part: Part
    record: FileRecord


class Planner(DefaultSavePlanner):
    """Plans a save at once, in the calling thread, so that the rest can happen in another.

    With copy=True the parts that this rank holds are copied to the host as well, and the tensors may change
    as soon as the planner exists.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, copy: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        super().set_up_planner(dict(tensors))
        self._local_plan = super().create_local_plan()
        self._copies: dict[MetadataIndex, Tensor] | None = None
        if copy:
            self._copies = {
                item.index: self._resolve(item).to("cpu", copy=True) for item in self._local_plan.items
            }
            self.state_dict = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        self.plan = self._local_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._copies is not None:
            return self._copies[write_item.index]
        return self._resolve(write_item)

    def _resolve(self, item: WriteItem) -> Tensor:
        tensor = super().resolve_data(item)
        assert isinstance(tensor, Tensor)
        return tensor.detach()


class Writer(StorageWriter):
    """Writes one checkpoint into a hidden folder, and renames it when all ranks are done.

    `needed` is the size in bytes of all tensors, known once the ranks have agreed on a plan; `temporary` is
    the hidden folder (rank 0). Errors of any rank are raised on all of them by torch.distributed.checkpoint.
    """

    def __init__(self, folder: Path, step: int, state: bytes, *, keep: int) -> None:
        self.folder, self.step = folder, step
        self.temporary = temporary_path(folder, step)
        self.needed: int | None = None
        self._state, self._keep = state, keep

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Nothing: what a rank has to know comes with its plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.needed = sum(_bytes(item) for plan in plans for item in plan.items) + len(self._state)
        if free_bytes(self.folder) < self.needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.temporary.mkdir()
        return [replace(plan, storage_data=(self.temporary, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, rank = plan.storage_data
        by_file: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            if _bytes(item):  # the index alone says that a tensor is empty
                by_file.setdefault(f"{_group(item.index.fqn)}-{rank:05d}.safetensors", []).append(item)
        results = []
        for file, items in by_file.items():
            results += _write_tensors(folder / file, items, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[Part]] = {name: [] for name in metadata.state_dict_metadata}
        records = {}
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            parts[result.index.fqn].append(written.part)
            records[written.part.file] = written.record
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = StoredTensor(
                dtype=entry.properties.dtype, shape=tuple(entry.size), parts=tuple(parts[name])
            )
        records[INDEX] = _write_file(self.temporary / INDEX, [encode_index(self.step, tensors)])
        records[STATE] = _write_file(self.temporary / STATE, [self._state])
        _write_file(self.temporary / CHECKSUMS, [encode_records(records)])
        sync_folder(self.temporary)
        final = final_path(self.folder, self.step)
        commit(self.temporary, final)
        keep_newest(self.folder, final, self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class Reader(StorageReader):
    """Reads tensors of a checkpoint that `inspect` has found whole."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._path, self._tensors = path, tensors

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a reader is used once."""

    def read_metadata(self) -> Metadata:
        return Metadata({name: _metadata(tensor) for name, tensor in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing: the index is there already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Part]]] = {}
        parts = {
            MetadataIndex(name, part.offsets): part
            for name, tensor in self._tensors.items()
            for part in tensor.parts
        }
        for item in plan.items:
            part = parts[item.storage_index]
            by_file.setdefault(part.file, []).append((item, part))
        for file, items in by_file.items():
            with safe_open(self._path / file, framework="pt") as stream:
                for item, part in items:
                    box = tuple(
                        slice(at, at + size)
                        for at, size in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(stream.get_slice(part.key)[box])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.shape))
        for part in tensor.parts
    ]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _group(name: str) -> str:
    """Which file a tensor goes to: one for each first part of the names, "model/..." into model-*."""
    first, slash, _ = name.partition("/")
    return first if slash and re.fullmatch(r"[A-Za-z0-9_]+", first) else "tensors"


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    return _data(item).chunk.sizes.numel() * _data(item).properties.dtype.itemsize


def _write_tensors(path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Write a safetensors file, one tensor in memory at a time: length of header, header (JSON), data."""
    # Wide dtypes first, so that every tensor starts at a multiple of its element size.
    items = sorted(items, key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for item in items:
        data = _data(item)
        offsets, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        key = part_key(item.index.fqn, offsets, shape, tuple(data.size))
        if key in header:
            raise ValueError(f"two tensors would both be stored as {key!r}; rename one")
        begin, end = end, end + _bytes(item)
        header[key] = {"dtype": CODES[data.properties.dtype], "shape": shape, "data_offsets": (begin, end)}
        parts.append(Part(file=path.name, key=key, offsets=offsets, shape=shape))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for item in items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and tensor.shape == _data(item).chunk.sizes
            yield tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data

    record = _write_file(path, pieces())
    return [
        WriteResult(
            index=item.index, size_in_bytes=_bytes(item), storage_data=_Written(part=part, record=record)
        )
        for item, part in zip(items, parts, strict=True)
    ]


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, put it on the disk, and return size and checksum of what was meant to be in it."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as stream:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _SLICE):
                part = view[start : start + _SLICE]
                digest.update(part)
                size += len(part)
                while part:
                    part = part[stream.write(part) :]
        os.fsync(stream.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())
