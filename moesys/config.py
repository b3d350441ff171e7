"""The configuration of a run: what to train, on what, how, and where the results go.

A run is reproduced by its resolved configuration alone (`moesys train --print-config`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moesys.models.config import ModelConfig
from moesys.models.presets import tiny_deepseek


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How the load of the experts is kept even. Penalties act in training only, never in evaluation."""

    bias_rate: float = 0.01
    """Step of the selection bias per optimiser step (auxiliary-loss-free balancing); 0 turns it off. The default
    suits runs of a thousand steps; DeepSeek-V3 took 0.001 over its far longer one."""
    loss_coef: float = 0.0001
    """Coefficient of the load-balance loss E/k * sum f_e P_e, summed over layers (1.0 = uniform)."""
    loss_scope: Literal["sequence", "batch"] = "sequence"
    """Over what f and P are taken: each sequence, or the global batch of the optimiser step."""
    z_loss_coef: float = 0.0
    """Coefficient of the router z-loss, the mean of logsumexp(logits)^2 over tokens, summed over layers."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how it becomes sequences of tokens."""

    source: str = "stdlib"
    """"stdlib" (the source files of this interpreter's standard library), or a file or folder."""
    format: Literal["auto", "text", "jsonl", "parquet", "datasets", "megatron"] = "auto"
    """Format of the source; "auto" goes by what the path holds."""
    text_field: str = "text"
    """Field or column that holds the text in JSON lines, Parquet and datasets."""
    validation: str = ""
    """Held-out text in the same format; "" holds out a share of the source's documents instead."""
    held_out: float = 0.05
    """Share of the documents held out, chosen by a hash of each document's name; of an only document, its end."""
    tokenizer: str = "bpe"
    """"bpe" (byte-level, model.vocab_size entries, trained on the training text), "bytes", or a tokenizer.json."""
    cache: str = ""
    """Folder of the token cache; "" is ~/.cache/moesys."""
    cross_document_attention: bool = False
    """Let attention and positions run on across the documents packed into one sequence."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 2.5e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.02
    """Decoupled decay of weight matrices; norms, biases, embeddings, the head and routers have none."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["cosine", "linear", "wsd", "step", "constant"] = "linear"
    """Shape of the learning rate after the warm-up. "wsd" stays at the peak, then decays."""
    warmup_share: float = 0.05
    """Share of all steps in which the rate rises linearly from 0."""
    min_lr_ratio: float = 0.02
    """Final learning rate as a share of the peak (cosine, linear, wsd)."""
    decay_share: float = 0.2
    """wsd: share of all steps, at the end, in which the rate decays."""
    step_milestones: tuple[float, ...] = (0.6, 0.9)
    """step: shares of all steps at which the rate is multiplied by step_factor."""
    step_factor: float = 0.316
    """step: factor at each milestone."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = 880
    """Optimiser steps."""
    batch_size: int = 4
    """Sequences per optimiser step, over all ranks and micro-batches."""
    micro_batch_size: int = 4
    """Sequences per forward; divides batch_size."""
    sequence_length: int = 512
    """Tokens per sequence."""
    seed: int = 0
    """Key of everything random: initialisation by parameter name, data order by sample index."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype; bfloat16 keeps float32 master weights, gradients and moments."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    threads: int = 0
    """CPU threads of PyTorch; 0 leaves its choice."""
    recompute: str = ""
    """What the backward computes again instead of keeping: "" nothing, "block" whole blocks, or named parts,
    comma-separated, of "attention", "feed_forward" (dense and shared), "experts", "moe" (whole MoE layers)."""
    compile: bool = False
    """torch.compile each block (needs a C++ compiler on the CPU)."""
    loss_chunk: int = 256
    """Tokens whose logits exist at one time in the fused cross-entropy."""
    mtp_weight: float = 0.3
    """Weight of the multi-token-prediction loss (DeepSeek-V3: 0.3, later 0.1)."""
    eval_interval: int = 220
    """Steps between evaluations on held-out text; 0 evaluates at the end only."""
    eval_tokens: int = 65_536
    """Held-out tokens of an evaluation during training; the last one takes all of them."""
    nan_patience: int = 3
    """Consecutive steps with a loss or gradient that is not finite (their update is skipped) before stopping."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is written for resuming."""

    interval: int = 250
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = 2
    """Checkpoints kept; older ones are removed once a newer one is whole."""
    asynchronous: bool = True
    """Write in a background thread while training goes on."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is shown and recorded besides metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: bool = False
    """Log to Weights & Biases as well (needs the package and a login)."""
    wandb_project: str = "moesys"
    """Weights & Biases project."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that one training run depends on."""

    preset: str = "tiny-deepseek"
    """Named model that the [model] values start from."""
    run_dir: str = ""
    """Folder for the results; "" takes the next free runs/PRESET-NNN."""
    model: ModelConfig = field(default_factory=tiny_deepseek)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
