"""One optimiser step: forward and backward of every micro-batch, clipping, AdamW, balancing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.config import RunConfig
from moesys.data import Batch
from moesys.models.initialise import build
from moesys.models.transformer import Transformer
from moesys.routing.bias import update_bias_
from moesys.routing.losses import batch_load_balance
from moesys.training.metrics import RoutingCounts
from moesys.training.objective import Units, count_units, objective
from moesys.training.recompute import apply_recompute
from moesys.training.schedule import learning_rate
from moesys.training.weights import MasterWeights, checkpoint_tensors, make_optimizer

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimiser step did. The loss parts are over the whole global batch."""

    loss: float
    ce_loss: float
    mtp_loss: float
    load_balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    """Real tokens of this step."""
    counts: RoutingCounts
    skipped: bool
    """True when loss or gradient was not finite: weights, moments and biases were left as they were."""


class Trainer:
    """A model with its optimiser. `step` is the number of finished optimiser steps."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.step = 0
        compute = DTYPES[config.training.precision]
        master = torch.float32 if compute == torch.bfloat16 else compute
        self.model: Transformer = build(config.model, config.training.seed, master, device)
        self.weights = MasterWeights(self.model, compute)
        self.optimizer = make_optimizer(self.weights, config.optimizer)
        if config.training.compile:
            # with dynamic shapes a recomputation may meet another graph than its forward
            dynamic = False if config.training.recompute else None
            for block in self.model.all_blocks():
                block.forward = torch.compile(block.forward, dynamic=dynamic)  # type: ignore[method-assign]
        apply_recompute(self.model, config.training.recompute)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds; loading fills them in place, followed by `loaded`."""
        return checkpoint_tensors(self.weights, self.optimizer)

    def loaded(self, step: int) -> None:
        """Go on from finished step `step`, after `tensors` were filled."""
        self.step = step
        self.weights.publish()

    def train_step(self, batches: Sequence[Batch]) -> StepResult:
        """One optimiser step on a global batch given as micro-batches on the device."""
        config = self.config
        self.weights.clear_gradients()
        units = count_units(batches, config.model.mtp_depth)
        counts = RoutingCounts()
        known = self._count_ahead(batches)
        parts: dict[str, Tensor] = {}
        for batch in batches:
            sums = self.model(
                batch.tokens, batch.labels, batch.positions, batch.documents, config.training.loss_chunk
            )
            counts.add(sums.routing)
            terms = objective(
                sums,
                units,
                config.balance,
                mtp_weight=config.training.mtp_weight if config.model.mtp_depth else 0.0,
                top_k=config.model.top_k,
                chosen=(known or counts).chosen,
            )
            terms.total.backward()
            for name in ("total", "ce", "mtp", "load_balance", "z"):
                value = getattr(terms, name).detach()
                parts[name] = parts[name] + value if name in parts else value
        if known is None and config.balance.loss_scope == "batch":
            parts["load_balance"] = self._batch_load_balance(counts, units)
        norm = self._clip()
        lr = learning_rate(config.optimizer, self.step + 1, config.training.steps)
        finite = bool(torch.isfinite(norm) & torch.isfinite(parts["total"]))
        if finite:
            self._update(lr, counts)
            self.weights.clear_gradients()
        self.step += 1
        return self._result(parts, norm, lr, units, counts, skipped=not finite)

    def _count_ahead(self, batches: Sequence[Batch]) -> RoutingCounts | None:
        """Global pair counts that scope `batch` needs before the first backward.

        With one micro-batch its own forward has them. With several, a forward pass without gradient collects
        them: the exact loss of the global batch costs one more forward.
        """
        balance = self.config.balance
        if len(batches) == 1 or balance.loss_scope != "batch" or balance.loss_coef == 0:
            return None
        counts = RoutingCounts()
        with torch.no_grad():
            for batch in batches:
                counts.add(self.model.hidden(batch.tokens, batch.positions, batch.documents).routing)
        return counts

    def _batch_load_balance(self, counts: RoutingCounts, units: Units) -> Tensor:
        """The loss of scope `batch`, a mean over layers, once the whole batch is known."""
        losses = [
            batch_load_balance(
                probabilities, counts.chosen[layer], max(units.tokens, 1), self.config.model.top_k
            )
            for layer, probabilities in counts.probabilities.items()
        ]
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def _clip(self) -> Tensor:
        """Global gradient norm before clipping; scales the gradients when it is above the limit.

        A norm that is not finite scales nothing: it would spoil every gradient, and hide which one was first.
        """
        gradients = list(self.weights.gradients().values())
        norm = torch.nn.utils.get_total_norm(gradients)
        limit = self.config.optimizer.clip
        if limit:
            scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), scale, 1.0))
        return norm

    def _update(self, lr: float, counts: RoutingCounts) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.weights.publish()
        if self.config.balance.bias_rate:
            for layer, moe in self.model.moe_layers():
                update_bias_(moe.router.bias, counts.chosen[layer], self.config.balance.bias_rate)

    def _result(
        self,
        parts: dict[str, Tensor],
        norm: Tensor,
        lr: float,
        units: Units,
        counts: RoutingCounts,
        *,
        skipped: bool,
    ) -> StepResult:
        return StepResult(
            loss=float(parts["total"]),
            ce_loss=float(parts["ce"]),
            mtp_loss=float(parts["mtp"]),
            load_balance_loss=float(parts["load_balance"]),
            z_loss=float(parts["z"]),
            grad_norm=float(norm),
            lr=lr,
            tokens=units.tokens,
            counts=counts,
            skipped=skipped,
        )
