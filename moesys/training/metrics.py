"""The figures of a step, and the file they go to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesys.machine import peak_memory
from moesys.models.moe import RoutingReport
from moesys.routing.load import load_figures
from moesys.training.folder import writing


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory()


class RoutingCounts:
    """Pairs (integers) and probabilities per expert and layer, summed over the micro-batches of one step."""

    def __init__(self) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.computed: dict[int, Tensor] = {}
        self.probabilities: dict[int, Tensor] = {}

    def add(self, routing: Mapping[int, RoutingReport]) -> None:
        """Count one micro-batch."""
        for layer, report in routing.items():
            for total, part in (
                (self.chosen, report.chosen),
                (self.computed, report.computed),
                (self.probabilities, report.probability_sum.detach()),
            ):
                total[layer] = total[layer] + part if layer in total else part

    def figures(self) -> dict[str, dict[str, Any]]:
        """Load figures by layer, as they stand in metrics.jsonl."""
        return {
            str(layer): asdict(load_figures(chosen, self.computed[layer]))
            for layer, chosen in self.chosen.items()
        }


class MetricsFile:
    """metrics.jsonl: one strict JSON object a line, a line a step, with the system before `write` returns.

    Every failure is an OSError that names the file and a way out.
    """

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open for appending, after dropping whatever a stopped run wrote beyond step `keep_steps`."""
        self.path = path
        with self._explained():
            self._file = path.open("a+b", buffering=0)
            end, ended = _end_of(path, keep_steps)
            self._file.truncate(end)
            if not ended:
                self._append(b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Append one line. Values that are not finite become null."""
        with self._explained():
            self._append(json.dumps(strict(row), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Put what was written on the disk."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _explained(self) -> AbstractContextManager[None]:
        return writing(
            self.path,
            "free some space or make it writable, then go on from the last checkpoint with "
            f"`moesys train --resume {self.path.parent}`",
        )


def strict(value: Any) -> Any:
    """The value as strict JSON has it: null in the place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of(path: Path, keep_steps: int) -> tuple[int, bool]:
    """Where the last line of a step up to keep_steps ends in bytes, and whether that is a line end."""
    at, end, ended = 0, 0, True
    with path.open("rb") as file:
        for line in file:
            at += len(line)
            if _step_of(line) <= keep_steps:
                end, ended = at, line.endswith(b"\n")
    return end, ended


def _step_of(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut off by a kill
