"""Every rule between the parts of a run's configuration, and with the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesys import validation
from moesys.config import RunConfig
from moesys.models.presets import PRESETS
from moesys.validation import machine_findings, run_findings, run_problems


def with_values(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The configuration with other values, given by dotted name."""
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        part = {section: replace(getattr(config, section), **{key: value})} if section else {key: value}
        config = replace(config, **part)
    return config


WSD = {"optimizer.schedule": "wsd"}
STEP = {"optimizer.schedule": "step"}
BROKEN: list[tuple[dict[str, Any], str, str]] = [  # changes, fields named, words of the rule
    ({"preset": "tiny"}, "preset", "no such preset"),
    ({"model.top_k": 99}, "model.top_k model.num_experts", "only 16 experts"),
    *[
        ({name: -0.1}, name, "negative")
        for name in ("balance.bias_rate", "balance.loss_coef", "balance.z_loss_coef", "optimizer.clip")
    ],
    ({"balance.loss_scope": "token"}, "balance.loss_scope", "one of"),
    ({"data.source": ""}, "data.source", "text"),
    ({"data.format": "jsonl"}, "data.source data.format", "plain text"),
    ({"data.held_out": 0.0}, "data.held_out", "above 0"),
    ({"data.held_out": 1.0}, "data.held_out", "below 1"),
    ({"data.text_field": ""}, "data.text_field", "field"),
    ({"data.tokenizer": ""}, "data.tokenizer", "tokenizer"),
    ({"data.tokenizer": "bytes", "model.vocab_size": 256}, "data.tokenizer model.vocab_size", "256 bytes"),
    ({"model.vocab_size": 256}, "data.tokenizer model.vocab_size", "256 bytes"),
    ({"optimizer.lr": 0.0}, "optimizer.lr", "above 0"),
    ({"optimizer.lr": float("nan")}, "optimizer.lr", "finite"),
    ({"optimizer.lr": "fast"}, "optimizer.lr", "a number"),
    ({"optimizer.eps": 0.0}, "optimizer.eps", "above 0"),
    ({"optimizer.betas": (0.9, 1.0)}, "optimizer.betas", "below 1"),
    ({"optimizer.betas": (0.9, float("inf"))}, "optimizer.betas", "finite"),
    ({"optimizer.weight_decay": -1.0}, "optimizer.weight_decay", "negative"),
    ({"optimizer.warmup_share": -0.1}, "optimizer.warmup_share", "between 0 and 1"),
    ({"optimizer.warmup_share": 100.0}, "optimizer.warmup_share", "between 0 and 1"),
    ({"optimizer.min_lr_ratio": 1.5}, "optimizer.min_lr_ratio", "between 0 and 1"),
    ({**WSD, "optimizer.decay_share": -0.1}, "optimizer.decay_share", "between 0 and 1"),
    (
        {**WSD, "optimizer.decay_share": 0.96},
        "optimizer.warmup_share optimizer.decay_share",
        "overlap",
    ),
    ({**STEP, "optimizer.step_milestones": (0.9, 0.6)}, "optimizer.step_milestones", "rising"),
    ({**STEP, "optimizer.step_milestones": (0.5, 0.5)}, "optimizer.step_milestones", "rising"),
    ({**STEP, "optimizer.step_milestones": (100.0,)}, "optimizer.step_milestones", "shares"),
    ({**STEP, "optimizer.step_factor": 0.0}, "optimizer.step_factor", "above 0"),
    *[
        ({f"training.{name}": 0}, f"training.{name}", "at least 1")
        for name in (
            "steps",
            "batch_size",
            "micro_batch_size",
            "sequence_length",
            "loss_chunk",
            "eval_tokens",
        )
    ],
    ({"training.nan_patience": 0}, "training.nan_patience", "at least 1"),
    ({"training.threads": -1}, "training.threads", "negative"),
    ({"training.eval_interval": -1}, "training.eval_interval", "negative"),
    ({"training.mtp_weight": -1.0}, "training.mtp_weight", "negative"),
    ({"training.micro_batch_size": 5}, "training.batch_size training.micro_batch_size", "evenly"),
    ({"training.micro_batch_size": 32}, "training.batch_size training.micro_batch_size", "evenly"),
    ({"training.seed": -1}, "training.seed", "at least 0"),
    ({"training.seed": 2**63}, "training.seed", "below 2^63"),
    ({"training.recompute": "attention,mlp"}, "training.recompute", "separated by commas"),
    ({"training.recompute": "block,attention"}, "training.recompute", "separated by commas"),
    ({"training.precision": "float16"}, "training.precision", "one of"),
    ({"training.device": "tpu"}, "training.device", "one of"),
    ({"model.mtp_depth": 512}, "model.mtp_depth training.sequence_length", "not that long"),
    (
        {"model.mtp_depth": 1, "training.mtp_weight": 0.0},
        "model.mtp_depth training.mtp_weight",
        "learn nothing",
    ),
    (
        {"model.yarn_factor": 2.0, "model.yarn_original_length": 100},
        "training.sequence_length model.yarn_factor model.yarn_original_length",
        "reaches",
    ),
    ({"checkpoint.interval": -1}, "checkpoint.interval", "negative"),
    ({"checkpoint.keep": 0}, "checkpoint.keep", "at least 1"),
    ({"logging.wandb": True, "logging.wandb_project": ""}, "logging.wandb_project", "project"),
]


@pytest.mark.parametrize(("changes", "names", "rule"), BROKEN)
def test_a_broken_rule_is_told(changes: dict[str, Any], names: str, rule: str) -> None:
    findings = run_findings(with_values(RunConfig(), changes))
    assert [fields for fields, _ in findings.found] == [tuple(names.split())]
    text = findings.problems[0]
    assert rule in text
    assert all(f"{name} = " in text for name in names.split())
    assert text.rpartition("; ")[2]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *[{"preset": name, "model": preset()} for name, preset in PRESETS.items()],
        {"optimizer.warmup_share": 1.0},
        {"training.steps": 1},
        {"optimizer.warmup_share": 0.0, **WSD, "optimizer.decay_share": 1.0},
        {**WSD, "optimizer.warmup_share": 0.93, "optimizer.decay_share": 0.07},
        {**STEP, "optimizer.step_milestones": ()},
        {"optimizer.step_milestones": (2.0, 1.0)},  # another schedule does not look at them
        {"data.held_out": 0.0, "data.validation": "held-out.txt"},
        {"training.recompute": "block"},
        {"training.recompute": "attention, moe"},
        {"training.sequence_length": 1},
        {"model.moe_layers": "", "balance.z_loss_coef": 1.0},  # nothing to balance, and no harm
        {"model.yarn_factor": 2.0, "model.yarn_original_length": 256},
        {"model.vocab_size": 100, "data.tokenizer": "tokenizer.json"},
    ],
)
def test_what_keeps_the_rules_is_accepted(changes: dict[str, Any]) -> None:
    assert run_problems(with_values(RunConfig(), changes)) == []


def test_parts_that_can_be_recomputed_are_those_of_training() -> None:
    from moesys.training.recompute import PARTS

    assert set(validation.RECOMPUTE_PARTS) == set(PARTS)


def machine_problems(changes: dict[str, Any]) -> list[str]:
    return machine_findings(with_values(RunConfig(), changes)).problems


def test_the_default_asks_nothing_of_the_machine() -> None:
    assert machine_problems({}) == []


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = machine_problems({"training.device": "cuda", "training.precision": "bfloat16"})
    assert problem.startswith('training.device = "cuda": PyTorch finds no CUDA device here; set')


def test_a_gpu_without_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert machine_problems({"training.device": "cuda"}) == []
    (problem,) = machine_problems({"training.device": "cuda", "training.precision": "bfloat16"})
    assert "has no bfloat16" in problem


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C++ compiler" in machine_problems({"training.compile": True})[0]
    assert machine_problems({"training.compile": False}) == []


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation.importlib.util, "find_spec", lambda name: None)
    assert "pip install wandb" in machine_problems({"logging.wandb": True})[0]


def test_missing_files_are_told_each(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    missing = {"data.source": "a", "data.validation": "b", "data.tokenizer": "c"}
    missing = {name: str(tmp_path / path) for name, path in missing.items()}
    assert [problem.partition(" =")[0] for problem in machine_problems(missing)] == list(missing)
    present = {
        "data.source": str(tmp_path / "corpus"),  # the name that a Megatron pair shares
        "data.validation": str(tmp_path),
        "data.tokenizer": "bytes",
    }
    assert machine_problems(present) == []
    assert len(machine_problems({**present, "data.format": "jsonl"})) == 1
