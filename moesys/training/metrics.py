"""The figures of a step, and the file they go to."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesys.models.moe import RoutingReport
from moesys.routing.load import load_figures


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
    """metrics.jsonl: one strict JSON object a line, a line a step; what is not finite becomes null."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open for appending, after dropping whatever a stopped run wrote beyond step `keep_steps`."""
        self.path = path
        text = path.read_text() if path.exists() else ""
        kept = "".join(line + "\n" for line in text.splitlines() if _step_of(line) <= keep_steps)
        if kept != text:
            beside = path.with_suffix(".tmp")
            beside.write_text(kept)
            os.replace(beside, path)
        self._file = path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut off by a kill


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
