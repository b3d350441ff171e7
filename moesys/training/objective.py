"""From a micro-batch's loss sums to the scalar whose gradient is taken.

Every term is a sum over the micro-batch divided by a number of the WHOLE global batch of the optimiser step, so
the micro-batches' losses add up to the loss of the batch, however it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesys.config import BalanceConfig
from moesys.data import Batch
from moesys.kernels.cross_entropy import IGNORE
from moesys.models.transformer import LossSums, prediction_targets
from moesys.routing.losses import batch_load_balance


@dataclass(frozen=True, kw_only=True)
class Units:
    """What the sums of a global batch are divided by."""

    labels: int
    """Positions with a next token to predict."""
    predicted: tuple[int, ...]
    """Per multi-token-prediction depth, positions with a token to predict."""
    tokens: int
    """Real tokens."""
    sequences: int
    """Sequences with at least one real token."""


def count_units(batches: Sequence[Batch], mtp_depth: int) -> Units:
    """Units of a global batch given as micro-batches."""
    predicted = [
        sum(int((prediction_targets(b.labels, b.documents, depth) != IGNORE).sum()) for b in batches)
        for depth in range(1, mtp_depth + 1)
    ]
    return Units(
        labels=sum(int((b.labels != IGNORE).sum()) for b in batches),
        predicted=tuple(predicted),
        tokens=sum(int((b.documents >= 0).sum()) for b in batches),
        sequences=sum(int((b.documents >= 0).any(dim=1).sum()) for b in batches),
    )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """One micro-batch's part of the global loss: the scalar to differentiate and its detached parts."""

    total: Tensor
    ce: Tensor
    mtp: Tensor
    load_balance: Tensor
    """Mean over MoE layers, without its coefficient."""
    z: Tensor
    """Mean over MoE layers, without its coefficient."""


def objective(
    sums: LossSums,
    units: Units,
    balance: BalanceConfig,
    *,
    mtp_weight: float,
    top_k: int,
    chosen: Mapping[int, Tensor],
) -> Terms:
    """Cross-entropy, plus mtp_weight times the mean over prediction depths, plus the router penalties.

    The penalties are coefficient times the sum over MoE layers. `chosen` gives, per layer, the pairs that chose
    each expert over the whole global batch ([E] int64); only scope `batch` reads it.
    """
    ce = sums.ce / max(units.labels, 1)
    zero = torch.zeros_like(ce)
    depths = [s / max(n, 1) for s, n in zip(sums.mtp, units.predicted, strict=True)]
    mtp = sum(depths, zero) / max(len(depths), 1)
    load_balance, z = zero, zero
    for layer, report in sums.routing.items():
        if balance.loss_scope == "sequence":
            load_balance = load_balance + report.load_balance_sum / max(units.sequences, 1)
        else:
            load_balance = load_balance + batch_load_balance(
                report.probability_sum, chosen[layer], max(units.tokens, 1), top_k
            )
        z = z + report.z_sum / max(units.tokens, 1)
    total = ce + mtp_weight * mtp + balance.loss_coef * load_balance + balance.z_loss_coef * z
    layers = max(len(sums.routing), 1)
    return Terms(
        total=total,
        ce=ce.detach(),
        mtp=mtp.detach(),
        load_balance=load_balance.detach() / layers,
        z=z.detach() / layers,
    )
