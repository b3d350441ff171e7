"""What a run says at its beginning and at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from moesys.config import RunConfig
from moesys.models.count import count_parameters


def introduction(folder: Path, config: RunConfig, data: str, device: torch.device) -> str:
    """What is going to be trained, a line a subject."""
    model, count = config.model, count_parameters(config.model)
    layers = model.moe_layer_indices
    lines = [
        f"run      {folder}",
        f"model    {config.preset}: {_size(count.total)} parameters, {_size(count.active)} active",
    ]
    if layers:
        lines.append(
            f"experts  {model.num_experts} routed (top-{model.top_k}, {model.router}) and "
            f"{model.num_shared_experts} shared in {len(layers)} of {model.num_layers} layers"
        )
    lines += [
        f"losses   {', '.join(_active_losses(config))}",
        f"data     {data}",
        f"device   {device}, {config.training.precision}, {torch.get_num_threads()} threads",
    ]
    return "\n".join(lines)


def conclusion(folder: Path, summary: dict[str, Any], *, exact_bytes: bool) -> str:
    """The figures of summary.json, and what to do next."""
    about = "" if exact_bytes else " (bytes estimated by document)"
    return (
        f"\nheld-out {summary['eval_bits_per_byte']:.4f} bits per byte{about}, loss {summary['eval_loss']:.4f} per "
        f"token on {summary['eval_tokens']:,} tokens; xz -9 needs {summary['xz_bits_per_byte']:.4f} bits per byte "
        f"for the same text\ntrained  {summary['tokens']:,} tokens in {summary['seconds']:,.0f} s\n\nnext:\n"
        f'  moesys generate {folder} --prompt "def " --max-new-tokens 200 --temperature 0.8\n'
        f"  moesys report {folder}\n"
        f"  moesys train --resume {folder} --training.steps {2 * summary['steps']}"
    )


def stopped(folder: Path, by: Signals, step: int) -> str:
    """How to go on after a signal."""
    return (
        f"stopped by {by.name} after step {step}; everything is saved. Go on with:\n"
        f"  moesys train --resume {folder}"
    )


def _size(count: int) -> str:
    """A number of parameters as people say it."""
    for unit, name in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def _active_losses(config: RunConfig) -> Iterator[str]:
    balance = config.balance
    yield "cross-entropy"
    if config.model.mtp_depth:
        yield f"multi-token prediction x {config.training.mtp_weight:g}"
    if config.model.moe_layer_indices:
        if balance.loss_coef:
            yield f"load balance ({balance.loss_scope}) x {balance.loss_coef:g}"
        if balance.z_loss_coef:
            yield f"router z x {balance.z_loss_coef:g}"
        if balance.bias_rate:
            yield f"bias balancing at rate {balance.bias_rate:g}"
