"""The figures that stand beside a run's charts: what was trained, how far, how well, how fast."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesys.models.config import ModelConfig
from moesys.models.count import count_parameters
from moesys.report.curves import tail_length, tail_mean
from moesys.report.metrics import Floats
from moesys.report.runs import Run, flatten

UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One figure of a run."""

    label: str
    text: str
    """The figure for a reader, with its unit."""
    value: float = math.nan
    """The figure itself; NaN where it is not known or not a number."""
    best: int = 0
    """1 if larger is better, -1 if smaller is, 0 if neither."""


def short_number(value: float) -> str:
    """Three significant figures with k, M, B or T: `short_number(10_312_000) == "10.3 M"`."""
    if not math.isfinite(value):
        return UNKNOWN
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{_three(value / scale)} {unit}"
    return f"{value:.0f}" if value == round(value) else _three(value)


def _three(value: float) -> str:
    """Three figures of a value below 1000, at most two of them after the point."""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{places}f}"


def short_bytes(value: float) -> str:
    """Bytes in binary units: `short_bytes(1.5 * 2**30) == "1.50 GiB"`."""
    if not math.isfinite(value):
        return UNKNOWN
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Two leading units: `duration(552) == "9 min 12 s"`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for unit, length in units:
        count, whole = divmod(whole, length)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def decimals(value: float, places: int = 3) -> str:
    """Fixed decimals, or a dash for what is not known."""
    return f"{value:.{places}f}" if math.isfinite(value) else UNKNOWN


def _number(mapping: dict[str, Any], key: str) -> float:
    value = mapping.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def _last(run: Run, name: str) -> float:
    """The last finite value of a quantity, NaN if there is none."""
    column = run.metrics.column(name)
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else math.nan


def final(run: Run, name: str) -> float:
    """A held-out figure from the summary, or from the last evaluation of a run that has not ended."""
    value = _number(run.summary, name)
    return value if math.isfinite(value) else _last(run, name)


def evaluations(run: Run, name: str) -> tuple[NDArray[np.int64], Floats]:
    """[M] steps and [M] finite held-out values; the last of an ended run is its final evaluation."""
    values, steps = run.metrics.column(name), run.metrics.steps
    known = np.isfinite(values)
    last = _number(run.summary, name)
    if math.isfinite(last):
        known &= steps < steps[-1]
        return np.append(steps[known], steps[-1]), np.append(values[known], last)
    return steps[known], values[known]


def xz_bits_per_byte(run: Run) -> float:
    """What `xz -9` needs for the held-out text, NaN while not known."""
    return _number(run.summary, "xz_bits_per_byte")


def seconds(run: Run) -> float:
    """Wall time from the summary; before it exists, tokens over throughput added up over the steps."""
    value = _number(run.summary, "seconds")
    if math.isfinite(value):
        return value
    tokens = np.diff(run.metrics.column("tokens"), prepend=0.0)
    rate = run.metrics.column("tokens_per_second")
    known = np.isfinite(tokens) & np.isfinite(rate) & (rate > 0)
    return float((tokens[known] / rate[known]).sum()) if known.any() else math.nan


def status(run: Run) -> str:
    """How far the run is, in words."""
    step = int(run.metrics.steps[-1])
    planned = run.setting("training.steps")
    if run.ended:
        return f"ended after {step:,} steps"
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    return f"in progress or interrupted: step {step:,}{of}"


def verdict(run: Run) -> str:
    """Bits per byte beside the yardstick, in a sentence."""
    bits, xz = final(run, "eval_bits_per_byte"), xz_bits_per_byte(run)
    if not math.isfinite(bits):
        return "No evaluation on held-out text yet."
    text = f"The model needs {bits:.3f} bits per byte of held-out text"
    if not math.isfinite(xz):
        return f"{text}."
    gain = 1 - bits / xz
    return f"{text}, {abs(gain):.0%} {'fewer' if gain >= 0 else 'more'} than the {xz:.3f} of xz -9."


def warnings(run: Run) -> list[str]:
    """What a reader should know before trusting a run's figures and charts."""
    metrics, lines = run.metrics, []
    lost = ~np.isfinite(metrics.column("loss"))
    if metrics.has("grad_norm"):
        lost |= ~np.isfinite(metrics.column("grad_norm"))
    steps = [f"{step:,}" for step in metrics.steps[lost]]
    if steps:
        where = ", ".join(steps[:5]) + (" and more" if len(steps) > 5 else "")
        count = f"{len(steps):,} step{'s' if len(steps) > 1 else ''}"
        lines.append(f"{count} had a loss or gradient that was not finite ({where}); curves have gaps there.")
    if metrics.truncated:
        lines.append(
            "The last line of metrics.jsonl is not whole and is left out; the run may be writing it."
        )
    return lines


def parameters(run: Run) -> tuple[float, float]:
    """Total and active parameters from the summary; before it exists, counted from the configuration."""
    total, active = _number(run.summary, "parameters"), _number(run.summary, "active_parameters")
    if math.isfinite(total):
        return total, active
    try:
        count = count_parameters(ModelConfig(**run.config["model"]))
    except (KeyError, TypeError, ValueError):  # written by another version, with other settings
        return math.nan, math.nan
    return float(count.total), float(count.active)


def figures(run: Run) -> list[Fact]:
    """The figures that runs are compared by, in the order shown."""
    metrics = run.metrics
    bits, loss, xz = final(run, "eval_bits_per_byte"), final(run, "eval_loss"), xz_bits_per_byte(run)
    tail = tail_length(len(metrics.steps))
    train = float(tail_mean(metrics.column("ce_loss"), tail))
    column = metrics.column("tokens_per_second")
    rate = float(np.median(column[np.isfinite(column)])) if metrics.has("tokens_per_second") else math.nan
    column = metrics.column("peak_memory_bytes")
    memory = float(np.nanmax(column)) if metrics.has("peak_memory_bytes") else math.nan
    total, active = parameters(run)
    about = "" if math.isfinite(_number(run.summary, "seconds")) else "about "
    return [
        Fact(label="Held-out bits per byte", text=decimals(bits), value=bits, best=-1),
        Fact(label="xz -9, the same text", text=decimals(xz), value=xz),
        Fact(label="Held-out loss (nats per token)", text=decimals(loss), value=loss),
        Fact(label="Training loss at the end", text=decimals(train), value=train),
        Fact(label="Steps", text=f"{metrics.steps[-1]:,}", value=float(metrics.steps[-1])),
        Fact(label="Tokens", text=short_number(_last(run, "tokens")), value=_last(run, "tokens")),
        Fact(label="Wall time", text=about + duration(seconds(run)), value=seconds(run)),
        Fact(label="Parameters", text=short_number(total), value=total),
        Fact(label="Active parameters", text=short_number(active), value=active),
        Fact(label="Tokens per second (median)", text=short_number(rate), value=rate, best=1),
        Fact(label="Peak memory", text=short_bytes(memory), value=memory, best=-1),
        *_expert_figures(run, tail),
    ]


def _expert_figures(run: Run, tail: int) -> list[Fact]:
    """Worst layer at the end of the run; nothing for a dense model."""
    layers = list(run.metrics.layers.values())
    if not layers:
        return []
    return [
        _worst("Maximal violation, worst layer", [tail_mean(layer.max_violation, tail) for layer in layers]),
        _worst("Dead experts, worst layer", [tail_mean(layer.dead, tail) for layer in layers]),
    ]


def _worst(label: str, values: Sequence[float]) -> Fact:
    known = [float(value) for value in values if math.isfinite(value)]
    worst = max(known, default=math.nan)
    return Fact(label=label, text=f"{worst:.3g}" if known else UNKNOWN, value=worst, best=-1)


def best_runs(row: Sequence[Fact]) -> set[int]:
    """Which of several runs are best in one figure; empty if they do not differ or no side is better."""
    signed = [fact.value * fact.best for fact in row]
    known = {value for value in signed if math.isfinite(value)}
    if row[0].best == 0 or len(known) < 2:
        return set()
    return {index for index, value in enumerate(signed) if value == max(known)}


def setup(run: Run) -> list[Fact]:
    """What was trained and where: configuration and environment in a few lines; unknown ones are left out."""
    lines = [
        ("Preset", _text(run, "preset")),
        ("Model", _model(run)),
        ("Experts", _experts(run)),
        ("Data", _join(run, "{data.source}, tokenizer {data.tokenizer}")),
        ("Batch", _join(run, "{training.batch_size} sequences of {training.sequence_length} tokens")),
        ("Optimiser", _join(run, "AdamW, peak rate {optimizer.lr}, {optimizer.schedule} schedule")),
        ("Precision", _join(run, "{training.precision}")),
        ("Seed", _text(run, "training.seed")),
        *((_title(key), _environment(value)) for key, value in run.environment.items()),
        ("Folder", str(run.folder)),
    ]
    return [Fact(label=label, text=text) for label, text in lines if text]


def _text(run: Run, key: str) -> str:
    value = run.setting(key)
    return "" if value is None else str(value)


def _join(run: Run, pattern: str) -> str:
    """The pattern with dotted keys replaced by settings; "" if one is missing."""
    flat = {key: value for key, value in flatten(run.config).items() if value != ""}
    pieces = pattern.replace("}", "{").split("{")
    if any(key not in flat for key in pieces[1::2]):
        return ""
    return "".join(str(flat[piece]) if index % 2 else piece for index, piece in enumerate(pieces))


def _model(run: Run) -> str:
    layers = "{model.num_layers} layers of width {model.d_model}, {model.attention} attention"
    return _join(run, f"{layers}, vocabulary {{model.vocab_size}}")


def _experts(run: Run) -> str:
    if not run.setting("model.moe_layers"):
        return ""
    return _join(
        run,
        "{model.num_experts} routed, top-{model.top_k}, and {model.num_shared_experts} shared, "
        'in MoE layers "{model.moe_layers}"; {model.router} router',
    )


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _environment(value: Any) -> str:
    """A value of environment.json on one line."""
    if isinstance(value, dict):
        return ", ".join(_named(key, item) for key, item in flatten(value).items())
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return "" if value is None else str(value)


def _named(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} {short_bytes(value)}"
    return f"{key.replace('_', ' ')} {value}"
