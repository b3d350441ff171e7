"""The figures of `moesys bench step`, as a table and as a JSON file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from moesys import machine
from moesys.benchmarks.transformers_models import Implementation, Trial
from moesys.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Least, middle and greatest of one figure over the rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(min=min(values), median=median(values), max=max(values))


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """One side's figures."""

    parameters: int
    """Trained elements."""
    tokens_per_second: Spread
    matmul_share: Spread
    """Counted FLOPs of a step per second, over the rate of matrix products in the same round."""
    peak_memory_bytes: int
    """Most that three steps took beside what Python and its imports take, in a process of their own."""
    imbalance: float
    """Fullest expert's load over the mean load after the timed steps, averaged over layers."""
    first_loss: float
    """Nats, at the first timed step."""
    last_loss: float
    """Nats, at the last timed step."""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """What one family gave."""

    config: ModelConfig
    flops_per_step: int
    matmul_rate: Spread
    """FLOP/s of large float32 matrix products."""
    moesys: SideResult
    transformers: SideResult
    implementation: Implementation
    """The fastest way of transformers, which its figures are of."""
    trials: list[Trial]
    """How it was found."""
    speed_ratios: list[float]
    """Tokens per second of moesys over those of transformers, round by round."""
    speed_ratio: Spread
    memory_ratio: float
    """Peak memory of moesys over that of transformers."""


def summary(family: str, result: FamilyResult) -> list[str]:
    """The lines that the terminal shows of one family."""
    ratio, chosen = result.speed_ratio, result.implementation
    tried = ", ".join(
        f"{trial.experts}/{trial.attention} {trial.tokens_per_second:,.0f} (of {trial.tokens})"
        for trial in result.trials
    )
    return [
        f"{family}: {result.flops_per_step / 1e9:.1f} GFLOP a step, "
        f"matrix products reach {result.matmul_rate.median / 1e9:.0f} GFLOP/s",
        f"  {'':<13}{'parameters':>12}{'tokens/s':>10}{'min to max':>18}{'of products':>13}"
        f"{'peak memory':>13}{'fullest expert':>16}{'loss':>18}",
        _side_line("moesys", result.moesys),
        _side_line("transformers", result.transformers),
        f"  speed ratio {ratio.median:.2f} (rounds {ratio.min:.2f} to {ratio.max:.2f}), "
        f"memory ratio {result.memory_ratio:.2f}",
        f"  transformers' best: {chosen.experts} experts, {chosen.attention} attention",
        f"  tried, tokens/s (of tokens a step): {tried}",
    ]


def write_json(
    path: Path, arguments: Sequence[str], described: dict[str, Any], results: dict[str, FamilyResult]
) -> None:
    """Write results, command (`moesys bench` and `arguments`), date, commit, versions, described machine."""
    record = {
        "command": shlex.join(["moesys", "bench", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "versions": machine.describe_versions(),
        "machine": described,
        "families": {family: asdict(result) for family, result in results.items()},
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _side_line(name: str, side: SideResult) -> str:
    speed = side.tokens_per_second
    between = f"{speed.min:,.0f} to {speed.max:,.0f}"
    memory = f"{side.peak_memory_bytes / 2**20:,.0f} MiB"
    loss = f"{side.first_loss:.3f} to {side.last_loss:.3f}"
    return (
        f"  {name:<13}{side.parameters:>12,}{speed.median:>10,.0f}{between:>18}{side.matmul_share.median:>13.1%}"
        f"{memory:>13}{f'{side.imbalance:.2f} x mean':>16}{loss:>18}"
    )
