"""The tensors that one forward takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

IGNORED = -100
"""Label of a token that has nothing to predict."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """B rows of S tokens with what each has to predict. All four are int64 [B, S]."""

    tokens: Tensor
    """Token ids."""
    labels: Tensor
    """The next token's id; -100 where there is none to predict, or on padding."""
    positions: Tensor
    """Position inside the document, counted from where the document starts in this row."""
    documents: Tensor
    """Index of the document inside the row, counting up from 0; -1 on padding."""

    @property
    def num_labels(self) -> int:
        """Tokens that have something to predict."""
        return int((self.labels != IGNORED).sum())

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop-1 as a batch (views of the same memory)."""
        return self._map(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **{name: function(value) for name, value in tensors.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationBatch(Batch):
    """A batch that knows how much text its labels stand for, so that nats become bits per byte."""

    row_bytes: Tensor
    """float64 [B]: UTF-8 bytes of the text that each row's labels stand for (end-of-text stands for none)."""
    exact_bytes: bool
    """False: a token's bytes are not known one by one; each token takes an even share of its document's."""

    @property
    def num_bytes(self) -> float:
        """UTF-8 bytes of the text that the labels stand for; a whole number when exact_bytes."""
        return float(self.row_bytes.sum())
