"""Charts of block characters for the terminal."""

from __future__ import annotations

import math

import numpy as np

from moesys.report.curves import bin_means
from moesys.report.metrics import Floats

BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = len(BLOCKS) - 1


def stretch(values: Floats, width: int) -> Floats:
    """[width] values: means over equal pieces of a longer curve, repeated values of a shorter one."""
    if len(values) > width:
        return bin_means(values, width)
    return values[np.arange(width) * len(values) // width]


def area(values: Floats, height: int, low: float, high: float) -> list[str]:
    """`height` lines, the top one first, with a column a value: filled up to it from `low` to `high`.

    A value always shows at least the lowest block; a NaN leaves its column empty.
    """
    levels = [_level(value, height * EIGHTHS, low, high) for value in values.tolist()]
    return [
        "".join(BLOCKS[min(max(level - row * EIGHTHS, 0), EIGHTHS)] for level in levels)
        for row in reversed(range(height))
    ]


def _level(value: float, top: int, low: float, high: float) -> int:
    if not math.isfinite(value):
        return 0
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(round(share * top), 1), top)


def load_bar(load: float) -> str:
    """One character for share * E: a half block at 1, a full one from 2 on, a dot for exactly 0."""
    if not math.isfinite(load):
        return "?"
    return "·" if load == 0 else BLOCKS[_level(load, EIGHTHS, 0.0, 2.0)]
