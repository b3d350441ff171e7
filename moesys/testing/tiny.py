"""Tiny models and batches for tests of models and training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moesys.config import BalanceConfig, OptimizerConfig, RunConfig, TrainingConfig
from moesys.data import IGNORED, Batch
from moesys.models.config import ModelConfig
from moesys.models.initialise import build
from moesys.models.transformer import Transformer
from moesys.training.trainer import Trainer

TINY = ModelConfig(
    vocab_size=13,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    kv_lora_rank=5,
    qk_nope_head_dim=3,
    qk_rope_head_dim=4,
    v_head_dim=2,
    rope_theta=20.0,
    d_ff=5,
    num_experts=4,
    d_expert=3,
    top_k=2,
    norm_eps=1e-3,
)
"""A dense layer and a MoE layer, each width another number so that no mix-up fits by chance."""


def tiny(**changes: Any) -> ModelConfig:
    """TINY with changes."""
    return replace(TINY, **changes)


def randomise(module: nn.Module, seed: int = 0, std: float = 0.5) -> None:
    """Give every parameter and buffer values that hide nothing: norms near 1 but not 1, biases not 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(noise * std + (1 if "norm" in name else 0))


def random_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model with `randomise`d values."""
    model = build(config, seed, dtype, "cpu")
    randomise(model, seed)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers in float64; those of the parameters require gradients."""
    values = {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}
    return values | {name: b.detach().double().clone() for name, b in model.named_buffers()}


def random_batch(vocab_size: int, rows: list[list[int]], length: int, seed: int = 0) -> Batch:
    """A batch whose rows hold documents of these lengths, then padding up to length.

    A token in five has no label, and the last one of a document has one, as it has in a stream.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), length)
    tokens, labels = (torch.randint(vocab_size, shape, generator=generator) for _ in range(2))
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORED
    positions, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    for row, sizes in enumerate(rows):
        start = 0
        for document, size in enumerate(sizes):
            documents[row, start : start + size] = document
            positions[row, start : start + size] = torch.arange(size)
            start += size
    labels[documents == -1] = IGNORED
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=documents)


def tiny_run(
    model: ModelConfig = TINY,
    *,
    balance: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """A float64 run of a tiny model with every penalty on; keywords change [training]."""
    return RunConfig(
        model=model,
        balance=replace(BalanceConfig(loss_coef=0.3, z_loss_coef=0.05, bias_rate=0.01), **(balance or {})),
        optimizer=replace(OptimizerConfig(lr=0.02, warmup_share=0.0, clip=0.5), **(optimizer or {})),
        training=replace(TrainingConfig(precision="float64", steps=20, loss_chunk=5), **training),
    )


def random_trainer(config: RunConfig, seed: int = 0) -> Trainer:
    """A trainer on the CPU whose weights are `randomise`d, as its masters are."""
    trainer = Trainer(config, torch.device("cpu"))
    start = random_model(config.model, seed, torch.float32).state_dict()
    for name, value in trainer.tensors().items():
        if name.startswith("model/"):
            value.copy_(start[name.removeprefix("model/")])
    trainer.loaded(0)
    return trainer


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of weights, biases and moments."""
    return {name: value.clone() for name, value in trainer.tensors().items()}


def cut(batch: Batch, size: int) -> list[Batch]:
    """Micro-batches of `size` rows."""
    return [batch.rows(start, start + size) for start in range(0, batch.tokens.shape[0], size)]


def arguments(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `Transformer.forward` takes."""
    return batch.tokens, batch.labels, batch.positions, batch.documents
