"""Thinning, smoothing and binning against their plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moesys.report.blocks import BLOCKS, area, load_bar, stretch
from moesys.report.curves import bin_means, smooth, smoothing_window, tail_length, tail_mean, thin

finite = st.floats(-1e6, 1e6, width=32)
curves = arrays(np.float64, st.integers(1, 400), elements=finite | st.just(math.nan))


@given(values=curves, limit=st.integers(5, 60))
@settings(deadline=None)
def test_thinning_keeps_ends_extremes_and_gaps(values: np.ndarray, limit: int) -> None:
    kept = thin(values, limit)
    assert len(kept) <= max(limit, 5)
    assert kept[0] == 0 and kept[-1] == len(values) - 1
    assert (np.diff(kept) > 0).all()
    known = values[np.isfinite(values)]
    if len(known):
        assert np.nanmax(values[kept]) == known.max()
        assert np.nanmin(values[kept]) == known.min()
    assert np.isnan(values[kept]).any() == np.isnan(values).any()


def test_a_short_curve_is_not_thinned() -> None:
    assert thin(np.arange(2000.0), 2000).tolist() == list(range(2000))


def test_every_spike_survives_thinning() -> None:
    values = np.zeros(100_000)
    spikes = np.arange(500, 100_000, 1000)
    values[spikes] = np.arange(1, 101)
    assert set(spikes) <= set(thin(values, 2000).tolist())


@given(values=curves, half=st.integers(0, 20))
@settings(deadline=None)
def test_smoothing_is_the_mean_of_the_neighbours(values: np.ndarray, half: int) -> None:
    smoothed = smooth(values, 2 * half + 1)
    for place, value in enumerate(values):
        near = [v for v in values[max(0, place - half) : place + half + 1] if math.isfinite(v)]
        expected = math.fsum(near) / len(near) if math.isfinite(value) else math.nan
        np.testing.assert_allclose(smoothed[place], expected, rtol=1e-9, atol=1e-5)


def test_windows_grow_with_the_run() -> None:
    assert [smoothing_window(length) for length in (1, 99, 100, 1000)] == [1, 1, 3, 21]
    assert [tail_length(length) for length in (1, 30, 1000, 10_000)] == [1, 1, 50, 100]


@given(values=curves, bins=st.integers(1, 50))
@settings(deadline=None)
def test_bins_are_means_of_pieces(values: np.ndarray, bins: int) -> None:
    means = bin_means(values, bins)
    if len(values) <= bins:
        np.testing.assert_array_equal(means, values)
        return
    edges = [int(edge) for edge in np.linspace(0, len(values), bins + 1)]
    for place, mean in enumerate(means):
        piece = [v for v in values[edges[place] : edges[place + 1]] if math.isfinite(v)]
        expected = math.fsum(piece) / len(piece) if piece else math.nan
        np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-9)


def test_tail_mean_leaves_out_what_is_not_known() -> None:
    rows = np.array([[9, 9], [1, np.nan], [3, np.nan]])
    np.testing.assert_array_equal(tail_mean(rows, 2), [2, np.nan])


def test_area_fills_from_below() -> None:
    assert area(np.array([0.0, 0.5, 1.0, math.nan]), 2, 0.0, 1.0) == ["  █ ", "▁██ "]
    assert area(np.array([3.0, 3.0]), 1, 3.0, 3.0) == ["▄▄"]


@pytest.mark.parametrize(
    ("load", "expected"), [(0.0, "·"), (0.01, "▁"), (1.0, "▄"), (2.0, "█"), (9.0, "█"), (math.nan, "?")]
)
def test_load_bars(load: float, expected: str) -> None:
    assert load_bar(load) == expected


@given(values=arrays(np.float64, st.integers(1, 200), elements=finite), width=st.integers(1, 80))
@settings(deadline=None)
def test_a_stretched_curve_has_the_width_and_stays_in_range(values: np.ndarray, width: int) -> None:
    column = stretch(values, width)
    assert len(column) == width
    assert values.min() - 1e-6 <= column.min() and column.max() <= values.max() + 1e-6
    assert set("".join(area(column, 3, values.min(), values.max()))) <= set(BLOCKS)
