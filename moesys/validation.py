"""The rules that the parts of a run's configuration keep among each other, and with this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path

from moesys.config import RunConfig
from moesys.models.fields import Findings
from moesys.models.presets import PRESETS
from moesys.models.validation import model_findings

RECOMPUTE_PARTS = ("attention", "feed_forward", "experts", "moe")
"""The PARTS of moesys.training.recompute, which would load PyTorch."""


def run_problems(config: RunConfig) -> list[str]:
    """Every contradiction in a run's configuration, the model's included; empty when it can run.

    Each message names the fields with their values, the rule that they break, and a way out.
    """
    return run_findings(config).problems


def run_findings(config: RunConfig) -> Findings:
    """`run_problems` with the fields of each."""
    findings = Findings(config)
    well_typed = findings.well_typed()
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        if dataclasses.is_dataclass(part) and section.name != "model":
            of_part = Findings(part, prefix=f"{section.name}.")
            well_typed &= of_part.well_typed()
            findings.found += of_part.found
    of_model = model_findings(config.model, prefix="model.")
    findings.found += of_model.found
    if well_typed and Findings(config.model).well_typed():
        _check_preset(findings, config)
        _check_balance(findings)
        _check_data(findings, config)
        _check_optimizer(findings, config)
        _check_schedule(findings, config)
        _check_training(findings, config)
        _check_sequences(findings, config)
        _check_outputs(findings, config)
    return findings


def machine_findings(config: RunConfig) -> Findings:
    """What a run asks for that this machine lacks: a device, a package, a compiler, a file."""
    findings = Findings(config)
    training, data = config.training, config.data
    if training.device == "cuda":
        _check_cuda(findings, config)
    findings.require(
        not training.compile or training.device == "cuda" or _has_compiler(),
        "training.compile training.device",
        "torch.compile needs a C++ compiler on the CPU, and neither g++ nor clang++ is on the PATH",
        "install one, or set training.compile = false",
    )
    findings.require(
        not config.logging.wandb or importlib.util.find_spec("wandb") is not None,
        "logging.wandb",
        "the wandb package is not installed",
        "run `pip install wandb`, or set logging.wandb = false",
    )
    files = {"data.source": data.source, "data.validation": data.validation, "data.tokenizer": data.tokenizer}
    for name, text in files.items():
        if text not in ("", "stdlib", "bpe", "bytes"):
            findings.require(
                _exists(text, data.format),
                name,
                "there is no such file or folder",
                "give the path of one that exists",
            )
    return findings


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++"))


def _exists(text: str, data_format: str) -> bool:
    path = Path(text).expanduser()
    # a Megatron corpus is named without the .bin and .idx of its two files
    return path.exists() or (data_format in ("auto", "megatron") and Path(f"{path}.bin").exists())


def _check_cuda(findings: Findings, config: RunConfig) -> None:
    import torch  # takes a second, and only this check needs it

    if findings.require(
        torch.cuda.is_available(),
        "training.device",
        "PyTorch finds no CUDA device here",
        'set training.device = "auto" or "cpu", or install a CUDA build of PyTorch and its driver',
    ):
        findings.require(
            config.training.precision != "bfloat16"
            or torch.cuda.is_bf16_supported(including_emulation=False),
            "training.precision training.device",
            "this GPU has no bfloat16",
            'set training.precision = "float32"',
        )


def _check_preset(findings: Findings, config: RunConfig) -> None:
    findings.require(
        config.preset in PRESETS, "preset", "there is no such preset", f"choose one of {', '.join(PRESETS)}"
    )


def _check_balance(findings: Findings) -> None:
    for name in ("bias_rate", "loss_coef", "z_loss_coef"):
        findings.not_negative(f"balance.{name}")


def _check_data(findings: Findings, config: RunConfig) -> None:
    data = config.data
    findings.require(
        data.source != "", "data.source", "there must be text", 'name a file or folder, or "stdlib"'
    )
    findings.require(
        data.source != "stdlib" or data.format in ("auto", "text"),
        "data.source data.format",
        "the standard library is plain text",
        'set data.format = "auto", or data.source to a path (./stdlib for a folder of that name)',
    )
    findings.require(
        data.validation != "" or 0 < data.held_out < 1,
        "data.held_out",
        "without data.validation a share of the documents is held out, above 0 and below 1",
        "the usual value is 0.05",
    )
    findings.require(
        data.text_field != "", "data.text_field", "must name a field", 'the usual value is "text"'
    )
    findings.require(
        data.tokenizer != "",
        "data.tokenizer",
        "there must be a tokenizer",
        'name a tokenizer.json, or "bpe" or "bytes"',
    )
    findings.require(
        data.tokenizer not in ("bpe", "bytes") or config.model.vocab_size >= 257,
        "data.tokenizer model.vocab_size",
        "its entries are at least the 256 bytes and the end of a document",
        "set model.vocab_size to 257 or more",
    )


def _check_optimizer(findings: Findings, config: RunConfig) -> None:
    findings.above_zero("optimizer.lr optimizer.eps")
    findings.not_negative("optimizer.weight_decay optimizer.clip")
    findings.require(
        all(0 <= beta < 1 for beta in config.optimizer.betas),
        "optimizer.betas",
        "each must be at least 0 and below 1",
        "the usual values are [0.9, 0.95]",
    )


def _check_schedule(findings: Findings, config: RunConfig) -> None:
    optimizer = config.optimizer
    fits = findings.within(0, 1, "optimizer.warmup_share")
    findings.within(0, 1, "optimizer.min_lr_ratio")
    if optimizer.schedule == "wsd" and findings.within(0, 1, "optimizer.decay_share") and fits:
        findings.require(
            optimizer.warmup_share + optimizer.decay_share <= 1,
            "optimizer.warmup_share optimizer.decay_share",
            "the warm-up and the decay must not overlap",
            "shorten one of them",
        )
    if optimizer.schedule == "step":
        marks = optimizer.step_milestones
        findings.require(
            all(0 < mark < 1 for mark in marks) and list(marks) == sorted(set(marks)),
            "optimizer.step_milestones",
            "must be shares of the run, above 0, below 1 and rising",
            "the usual values are [0.6, 0.9]",
        )
        findings.above_zero("optimizer.step_factor")


def _check_training(findings: Findings, config: RunConfig) -> None:
    training = config.training
    sizes = "training.batch_size training.micro_batch_size"
    findings.at_least(1, "training.steps training.sequence_length training.loss_chunk training.eval_tokens")
    findings.at_least(1, "training.nan_patience")
    findings.not_negative("training.threads training.eval_interval training.mtp_weight")
    if findings.at_least(1, sizes):
        findings.require(
            training.batch_size % training.micro_batch_size == 0,
            sizes,
            "the micro-batches must divide the batch evenly",
            "choose batch_size as a multiple of micro_batch_size",
        )
    findings.require(
        0 <= training.seed < 2**63,
        "training.seed",
        "must be at least 0 and below 2^63",
        "the usual value is 0",
    )
    parts = [part.strip() for part in training.recompute.split(",")]
    findings.require(
        training.recompute in ("", "block") or set(parts) <= set(RECOMPUTE_PARTS),
        "training.recompute",
        'must be "", "block", or parts separated by commas',
        f"the parts are {', '.join(RECOMPUTE_PARTS)}",
    )


def _check_sequences(findings: Findings, config: RunConfig) -> None:
    model, training = config.model, config.training
    findings.require(
        model.mtp_depth < training.sequence_length or model.mtp_depth == 0,
        "model.mtp_depth training.sequence_length",
        "multi-token prediction looks mtp_depth tokens further, and the sequence is not that long",
        "lengthen the sequence or lower mtp_depth",
    )
    findings.require(
        model.mtp_depth <= 0 or training.mtp_weight > 0,
        "model.mtp_depth training.mtp_weight",
        "with no weight on their loss the multi-token-prediction modules would learn nothing",
        "raise mtp_weight (DeepSeek-V3: 0.3), or set mtp_depth = 0",
    )
    findings.require(
        model.yarn_factor == 1 or training.sequence_length <= model.yarn_factor * model.yarn_original_length,
        "training.sequence_length model.yarn_factor model.yarn_original_length",
        "YaRN reaches yarn_factor * yarn_original_length tokens",
        "raise yarn_factor or shorten the sequence",
    )


def _check_outputs(findings: Findings, config: RunConfig) -> None:
    findings.not_negative("checkpoint.interval")
    findings.at_least(1, "checkpoint.keep")
    findings.require(
        not config.logging.wandb or config.logging.wandb_project != "",
        "logging.wandb_project",
        "Weights & Biases needs a project",
        'the usual value is "moesys"',
    )
