"""Make long curves short without hiding what a reader looks for. N logged steps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesys.report.metrics import Floats


def smoothing_window(length: int) -> int:
    """Steps averaged for a smoothed curve: 2% of the run, an odd number."""
    return 2 * (length // 100) + 1


def smooth(values: Floats, window: int) -> Floats:
    """[N] centred moving mean over an odd number of steps, fewer at both ends; NaN is left out of the mean.

    A place that is itself NaN stays NaN, so that a smoothed curve does not bridge it.
    """
    half = min(window // 2, max(len(values) - 1, 0))
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    number = count[high] - count[low]
    return np.where(known, (total[high] - total[low]) / np.maximum(number, 1), np.nan)


def thin(values: Floats, limit: int) -> NDArray[np.intp]:
    """Indices, ascending and at most `limit`, that keep the shape of a curve: all of them if they are few.

    The curve is cut into equal pieces; of each piece its smallest and its largest value stay, and its first
    NaN, so that spikes and gaps remain. The first and the last point stay always. `limit` is at least 5.
    """
    length = len(values)
    if length <= limit:
        return np.arange(length)
    edges = np.linspace(0, length, (limit - 2) // 3 + 1).astype(int)
    chosen = {0, length - 1}
    for low, high in itertools.pairwise(edges):
        piece = values[low:high]
        known = np.isfinite(piece)
        if known.any():
            chosen.add(low + int(np.argmin(np.where(known, piece, np.inf))))
            chosen.add(low + int(np.argmax(np.where(known, piece, -np.inf))))
        if not known.all():
            chosen.add(low + int(np.argmin(known)))
    return np.array(sorted(chosen))


def bin_means(values: NDArray[Any], bins: int) -> NDArray[Any]:
    """[bins, ...] means over equal pieces of the first axis, NaN left out; all rows if they are few."""
    length = len(values)
    if length <= bins:
        return values
    edges = np.linspace(0, length, bins + 1).astype(int)[:-1]
    known = np.isfinite(values)
    total = np.add.reduceat(np.where(known, values, 0), edges, axis=0, dtype=np.float64)
    count = np.add.reduceat(known, edges, axis=0, dtype=np.int64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def tail_mean(values: NDArray[Any], count: int) -> Any:
    """Mean over the last `count` rows, NaN left out: [...] for [N, ...]; NaN where there is nothing."""
    return bin_means(values[-count:], 1)[0]


def tail_length(length: int) -> int:
    """Steps at the end that "at the end" means: 5% of the run, from 1 to 100."""
    return max(1, min(100, length // 20))
