"""Run folders made up for the tests: the shape of a real run, from a formula."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONFIG = """\
preset = "{preset}"
run_dir = "{run_dir}"

[model]
vocab_size = 4096
d_model = 256
num_layers = 6
attention = "mla"
moe_layers = "{moe_layers}"
num_experts = {num_experts}
num_shared_experts = 1
top_k = 4
router = "sigmoid"

[data]
source = "stdlib"
tokenizer = "bpe"

[optimizer]
lr = {lr}
schedule = "cosine"
clip = 1.0

[training]
steps = {planned}
batch_size = 16
sequence_length = 256
precision = "float32"
seed = {seed}
"""
ENVIRONMENT = {
    "command": ["moesys", "train", "--data.source", "my texts"],
    "python": "3.11.2",
    "platform": "Linux-6.1-x86_64",
    "packages": {"moesys": "0.1.0", "torch": "2.13.0"},
    "commit": None,
    "threads": 2,
}


def record(
    step: int, planned: int, layers: Sequence[int], num_experts: int, lr: float, noise: np.random.Generator
) -> dict[str, Any]:
    """One line of metrics.jsonl: a loss that falls, experts that grow even."""
    ce = 2.6 + 5.6 * math.exp(-step / 90) + 0.25 * lr / 3e-3 * math.exp(-step / 500) + noise.normal(0, 0.04)
    experts = {}
    for layer in layers:
        spread = 1.1 * math.exp(-step / 150) + 0.12
        taste = np.random.default_rng(layer).normal(size=num_experts)
        load = np.exp(spread * taste + noise.normal(0, 0.05, num_experts))
        if step < 60:
            load[layer % num_experts] = 0.0
        share = load / load.sum()
        known = share[share > 0]
        experts[str(layer)] = {
            "share": [round(float(value), 6) for value in share],
            "max_violation": float(share.max() * num_experts - 1),
            "entropy": float(-(known * np.log(known)).sum()),
            "dropped_share": 0.0,
            "dead": int((share == 0).sum()),
        }
    warm = min(1.0, step / 100)
    line = {
        "step": step,
        "tokens": 4000 * step,
        "loss": ce + 0.001,
        "ce_loss": ce,
        "load_balance_loss": 1.0 + 0.4 * math.exp(-step / 120) if layers else 0.0,
        "z_loss": 0.1 + step / 5000 + float(noise.normal(0, 0.01)) if layers else 0.0,
        "grad_norm": 0.4
        + 6 * math.exp(-step / 40)
        + abs(float(noise.normal(0, 0.1)))
        + 9 * (step % 307 == 0),
        "lr": lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / planned)),
        "tokens_per_second": 7200 + float(noise.normal(0, 250)),
        "peak_memory_bytes": int(1.2e9 + 3e8 * warm),
        "experts": experts,
    }
    if step % 250 == 0 or step == planned:
        line |= {"eval_loss": ce + 0.1, "eval_bits_per_byte": (ce + 0.1) * 0.585, "eval_tokens": 65536}
    return line


def write_run(
    folder: Path,
    *,
    steps: int = 1000,
    planned: int | None = None,
    layers: Sequence[int] = (1, 2, 3, 4, 5),
    num_experts: int = 16,
    lr: float = 3e-3,
    seed: int = 0,
    ended: bool = True,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write a run folder; `change` may alter each line's object before it is written."""
    folder.mkdir(parents=True)
    planned = planned or steps
    noise = np.random.default_rng(seed)
    lines = [record(step, planned, layers, num_experts, lr, noise) for step in range(1, steps + 1)]
    for line in lines:
        if change is not None:
            change(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    preset = "tiny-deepseek" if layers else "tiny-dense"
    moe_layers = ",".join(map(str, layers))
    (folder / "config.toml").write_text(
        CONFIG.format(
            preset=preset,
            run_dir=folder,
            moe_layers=moe_layers,
            num_experts=num_experts,
            lr=lr,
            planned=planned,
            seed=seed,
        )
    )
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    if ended:
        summary = {
            "steps": steps, "tokens": 4000 * steps, "seconds": 552.4, "eval_loss": 2.71,
            "eval_bits_per_byte": 1.5854, "eval_tokens": 200_000, "eval_bytes": 700_000,
            "xz_bits_per_byte": 1.8021, "parameters": 10_312_000, "active_parameters": 5_620_000,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(name="write_run", scope="session")
def write_run_fixture() -> Callable[..., Path]:
    """`write_run(folder, ...)`, the maker of run folders."""
    return write_run
