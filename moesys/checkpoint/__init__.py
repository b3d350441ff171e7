"""Checkpoints: written whole or not at all, checked on reading, and never unpickled."""

from __future__ import annotations

from moesys.checkpoint.integrity import DamagedCheckpointError, verify
from moesys.checkpoint.layout import list_checkpoints
from moesys.checkpoint.loader import load, load_newest, read_tensors
from moesys.checkpoint.saver import Checkpointer

__all__ = [
    "Checkpointer",
    "DamagedCheckpointError",
    "list_checkpoints",
    "load",
    "load_newest",
    "read_tensors",
    "verify",
]
