"""What a checkpoint holds: `index.json` says which file has which part of which tensor.

A part is a box of its tensor: offsets and shape. A tensor that was whole on one rank has one part, stored
under the tensor's own name, so that any safetensors reader finds it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

VERSION = 1
# The dtypes a checkpoint can hold, with their names in the safetensors format.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a tensor, in a file under a key."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint: its dtype, its whole shape, and the parts that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def part_key(name: str, offsets: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """The key of a part in its file: the tensor's name, with the box behind it unless it is all of it."""
    if shape == whole:
        return name
    return f"{name}[{','.join(f'{at}:{at + size}' for at, size in zip(offsets, shape, strict=True))}]"


def encode_index(step: int, tensors: Mapping[str, StoredTensor]) -> bytes:
    """The content of `index.json`."""
    entries = {}
    for name, tensor in sorted(tensors.items()):
        parts = [
            {"file": part.file, "key": part.key, "offsets": part.offsets, "shape": part.shape}
            for part in tensor.parts
        ]
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "parts": parts}
    return json.dumps({"version": VERSION, "step": step, "tensors": entries}).encode()


def decode_index(content: bytes) -> dict[str, StoredTensor]:
    """The tensors that an `index.json` describes. ValueError with the reason if it makes no sense."""
    try:
        index = json.loads(content)
        if index["version"] != VERSION:
            raise ValueError(f"index.json has version {index['version']}, this program reads {VERSION}")
        tensors = {name: _decode_tensor(entry) for name, entry in index["tensors"].items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"index.json is malformed ({type(error).__name__}: {error})") from error
    for name, tensor in tensors.items():
        if not _covered(tensor):
            raise ValueError(f"the parts in index.json do not make up tensor {name!r}")
    return tensors


def _decode_tensor(entry: dict[str, Any]) -> StoredTensor:
    parts = tuple(
        Part(
            file=str(part["file"]),
            key=str(part["key"]),
            offsets=_sizes(part["offsets"]),
            shape=_sizes(part["shape"]),
        )
        for part in entry["parts"]
    )
    return StoredTensor(dtype=_DTYPES[entry["dtype"]], shape=_sizes(entry["shape"]), parts=parts)


def _sizes(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"expected sizes, got {values}")
    return tuple(values)


def _covered(tensor: StoredTensor) -> bool:
    """Whether the parts lie inside the tensor, begin at different places, and together have its size."""
    for part in tensor.parts:
        if not len(part.offsets) == len(part.shape) == len(tensor.shape):
            return False
        if any(at + size > n for at, size, n in zip(part.offsets, part.shape, tensor.shape, strict=True)):
            return False
    if len({part.offsets for part in tensor.parts}) < len(tensor.parts):
        return False
    return sum(math.prod(part.shape) for part in tensor.parts) == math.prod(tensor.shape)
