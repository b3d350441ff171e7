"""Activation recomputation, applied to a finished model from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moesys.models.feed_forward import FeedForward
from moesys.models.moe import RoutingMemory
from moesys.models.transformer import Transformer

PARTS = ("attention", "feed_forward", "experts", "moe")
"""What can be named instead of "block"."""


def apply_recompute(model: Transformer, text: str) -> None:
    """Make the named parts keep only their inputs; see `TrainingConfig.recompute` for the names.

    Routing is remembered in the first forward and replayed in the second, never computed again.
    """
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        routes = part in ("block", "moe")
        if routes:
            for _, layer in model.moe_layers():
                # compiled, first run and replay would be two graphs, which save different tensors
                layer.route = torch.compiler.disable(layer.route)  # type: ignore[method-assign]
        for module in _modules(model, part):
            module.forward = _checkpointed(module.forward, routes=routes)


def _modules(model: Transformer, part: str) -> Iterator[nn.Module]:
    blocks = model.all_blocks()
    layers = [layer for _, layer in model.moe_layers()]
    match part:
        case "block":
            yield from blocks
        case "attention":
            yield from (block.attention for block in blocks)
        case "feed_forward":
            yield from (module for module in model.modules() if isinstance(module, FeedForward))
        case "experts":
            yield from (layer.experts for layer in layers)
        case "moe":
            yield from layers
        case _:
            raise ValueError(f'recompute: {part!r} is not "block" or one of {", ".join(PARTS)}')


def _checkpointed(forward: Callable[..., Any], *, routes: bool) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if routes:
            # both runs get the same object: the first fills it, the second reads it
            kwargs["memory"] = kwargs.get("memory") or RoutingMemory()
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped
