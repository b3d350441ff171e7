"""Read a run's metrics.jsonl into arrays.

N logged steps, E routed experts of a layer. A value that was not finite stands in the file as null and
becomes NaN here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

REQUIRED = ("step", "tokens", "loss")
LOAD_NUMBERS = ("max_violation", "entropy", "dropped_share", "dead")


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Load of one MoE layer's experts over the run; NaN at steps that do not report the layer."""

    share: Floats
    """[N, E] float32, share of the routed (token, choice) pairs that each expert got."""
    max_violation: Floats
    """[N] float64, largest load over mean load, minus 1."""
    entropy: Floats
    """[N] float64, entropy of the shares in nats."""
    dropped_share: Floats
    """[N] float64, share of the pairs dropped over capacity."""
    dead: Floats
    """[N] float64, number of experts that got nothing."""

    @property
    def num_experts(self) -> int:
        """Routed experts of the layer."""
        return self.share.shape[1]

    @property
    def relative_load(self) -> Floats:
        """[N, E], share * E: 1.0 for every expert when the load is even."""
        return self.share * np.float32(self.num_experts)

    @property
    def relative_entropy(self) -> Floats:
        """[N], entropy / ln E: 1.0 when the load is even (also for a single expert)."""
        if self.num_experts == 1:
            return np.where(np.isnan(self.entropy), np.nan, 1.0)
        return self.entropy / math.log(self.num_experts)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Everything in one metrics.jsonl."""

    steps: NDArray[np.int64]
    """[N] strictly increasing."""
    columns: dict[str, Floats]
    """[N] float64 for each number in the file except step; NaN where a line lacks it or has null."""
    layers: dict[int, LayerLoad]
    """By layer index, ascending; empty for a dense model."""
    truncated: bool
    """The last line was not whole (the run was writing it, or was killed while it did) and is left out."""

    def column(self, name: str) -> Floats:
        """[N] float64, all NaN for a quantity the file does not hold."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def has(self, name: str) -> bool:
        """Whether the file holds at least one finite value of this quantity."""
        return bool(np.isfinite(self.column(name)).any())

    @property
    def auxiliary(self) -> list[str]:
        """Names of the auxiliary losses that the file holds, in its order."""
        main = ("loss", "ce_loss", "eval_loss")
        return [
            name for name in self.columns if name.endswith("_loss") and name not in main and self.has(name)
        ]


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl, leaving out a last line without its end.

    Raises ValueError that names the file and the line for anything else that is not a metrics line, and for
    a file without a single whole line; OSError if it cannot be read.
    """
    records: list[dict[str, Any]] = []
    truncated = False
    last_step = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = _parse(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    truncated = True
                    break
                raise ValueError(f"{path} line {number}: {error}{_MEND}") from None
            try:
                records.append(_checked(record, last_step))
            except ValueError as error:
                raise ValueError(f"{path} line {number}: {error}{_MEND}") from None
            last_step = records[-1]["step"]
    if not records:
        raise ValueError(
            f"{path} holds no whole line, so there is nothing to show: the run has not finished its first "
            "step. Wait for it, or resume it with `moesys train --resume RUN`."
        )
    try:
        layers = _layers([record.get("experts", {}) for record in records])
    except ValueError as error:
        raise ValueError(f"{path} {error}{_MEND}") from None
    return Metrics(
        steps=np.array([record["step"] for record in records], dtype=np.int64),
        columns=_columns(records),
        layers=layers,
        truncated=truncated,
    )


_MEND = (
    ". Only the last line may be incomplete; mend or remove this one (a copy of the file is wise), "
    "or resume the run from a checkpoint before it."
)


def _parse(line: bytes) -> dict[str, Any]:
    """The object in a line, expert shares already as arrays. Raises ValueError saying what is wrong."""
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"is {_kind(record)}, expected an object with {', '.join(REQUIRED)} and more")
    return record


def _refuse_constant(text: str) -> None:
    raise ValueError(f"holds {text}, which is not JSON; a value that is not finite is written as null")


def _checked(record: dict[str, Any], last_step: int) -> dict[str, Any]:
    """The record with float32 shares, or ValueError naming the key at fault."""
    for name in REQUIRED:
        if name not in record:
            raise ValueError(f"lacks {name!r}; every line holds {', '.join(REQUIRED)}")
    step = record["step"]
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"step is {_kind(step)}, expected a whole number")
    if step <= last_step:
        raise ValueError(f"step {step} follows step {last_step}; steps must increase from 1")
    for name, value in record.items():
        if name != "experts" and not _is_number(value):
            raise ValueError(f"{name} is {_kind(value)}, expected a number or null")
    experts = record.get("experts", {})
    if not isinstance(experts, dict):
        raise ValueError(f"experts is {_kind(experts)}, expected an object of layers")
    record["experts"] = {key: _checked_layer(key, value) for key, value in experts.items()}
    return record


def _checked_layer(key: str, layer: Any) -> dict[str, Any]:
    if not (key.isascii() and key.isdigit()):
        raise ValueError(f"experts.{key}: a layer is named by its index, such as experts.3")
    if not isinstance(layer, dict):
        raise ValueError(f"experts.{key} is {_kind(layer)}, expected an object")
    share = layer.get("share")
    if not isinstance(share, list) or not share or not all(map(_is_number, share)):
        raise ValueError(
            f"experts.{key}.share is {_kind(share)}, expected a list with a number for each expert"
        )
    for name in LOAD_NUMBERS:
        if not _is_number(layer.get(name)):
            raise ValueError(f"experts.{key}.{name} is {_kind(layer[name])}, expected a number or null")
    return layer | {"share": np.array(share, dtype=np.float32)}


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _kind(value: object) -> str:
    """How JSON calls a value, with the value where it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return json.dumps(value)[:40]


def _columns(records: list[dict[str, Any]]) -> dict[str, Floats]:
    names = dict.fromkeys(name for record in records for name in record)
    return {
        name: _numbers(record.get(name) for record in records)
        for name in names
        if name not in ("step", "experts")
    }


def _numbers(values: Iterable[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _layers(experts: list[dict[str, Any]]) -> dict[int, LayerLoad]:
    """Arrays by layer. Raises ValueError if a layer's number of experts changes."""
    keys = sorted({key for step in experts for key in step}, key=int)
    return {int(key): _layer(key, [step.get(key, {}) for step in experts]) for key in keys}


def _layer(key: str, rows: list[dict[str, Any]]) -> LayerLoad:
    width = next(len(row["share"]) for row in rows if row)
    share = np.full((len(rows), width), np.nan, dtype=np.float32)
    for index, row in enumerate(rows):
        if not row:
            continue
        if len(row["share"]) != width:
            raise ValueError(
                f"line {index + 1}: experts.{key}.share has {len(row['share'])} experts, "
                f"the lines before it {width}"
            )
        share[index] = row["share"]
    numbers = {name: _numbers(row.get(name) for row in rows) for name in LOAD_NUMBERS}
    return LayerLoad(share=share, **numbers)
