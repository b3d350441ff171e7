"""Steps that all ranks take together, so that an error of one is an error of all and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function on rank 0 and give every rank its result, or raise its error on every rank.

    Collective over `group` (all ranks if None); a plain call where torch.distributed is not in use.
    """
    if not distributed():
        return function()
    message: list = [None, None]
    if dist.get_rank() == 0:
        try:
            message[0] = function()
        except Exception as error:
            message[1] = error
    dist.broadcast_object_list(message, src=0, group=group)
    if message[1] is not None:
        raise message[1]
    return message[0]


def on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call a function on every rank; if it fails on any, raise on all, the own error first.

    Collective over `group` (all ranks if None); a plain call where torch.distributed is not in use.
    """
    if not distributed():
        return function()
    result, own = None, None
    try:
        result = function()
    except Exception as error:
        own = error
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, own, group=group)
    if own is not None:
        raise own
    for rank, other in enumerate(errors):
        if other is not None:
            kind = next((k for k in (ValueError, OSError) if isinstance(other, k)), RuntimeError)
            raise kind(f"rank {rank}: {other}")
    return result  # type: ignore[return-value]
