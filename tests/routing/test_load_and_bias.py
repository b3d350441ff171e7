from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesys.routing.bias import update_bias_
from moesys.routing.load import load_figures
from moesys.routing.token_choice import route


def test_figures_by_hand():
    found = load_figures(torch.tensor([6, 2, 0, 0]), torch.tensor([4, 2, 0, 0]))
    assert found.share == [0.75, 0.25, 0.0, 0.0]
    assert found.max_violation == 2.0  # 6 / 2 - 1
    assert found.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert found.dropped_share == 0.25
    assert found.dead == 2


def test_even_load():
    found = load_figures(torch.full((8,), 5), torch.full((8,), 5))
    assert (found.max_violation, found.dropped_share, found.dead) == (0.0, 0.0, 0)
    assert found.entropy == pytest.approx(math.log(8))


def test_nothing_routed():
    found = load_figures(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert found.share == [0.0] * 3
    assert (found.max_violation, found.entropy, found.dropped_share, found.dead) == (0.0, 0.0, 0.0, 3)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8).filter(any))
def test_figures_are_within_their_bounds(counts):
    found = load_figures(torch.tensor(counts), torch.tensor(counts))
    assert sum(found.share) == pytest.approx(1)
    assert -1e-12 <= found.max_violation <= len(counts) - 1 + 1e-9
    assert -1e-12 <= found.entropy <= math.log(len(counts)) + 1e-9
    assert found.dead == counts.count(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_moves_by_the_rate_towards_the_mean(dtype):
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0], dtype=dtype)
    before = bias.clone()
    out = update_bias_(bias, torch.tensor([10, 4, 7, 7]), 0.125)
    assert out is bias
    assert torch.equal(bias - before, torch.tensor([-0.125, 0.125, 0.0, 0.0], dtype=dtype))


def test_bias_stays_without_tokens():
    bias = torch.tensor([0.5, -0.25])
    update_bias_(bias, torch.tensor([0, 0]), 0.1)
    assert bias.tolist() == [0.5, -0.25]


def test_the_mean_is_exact_for_counts_beyond_float32():
    big = 2**40
    bias = torch.zeros(3)
    update_bias_(bias, torch.tensor([big, big + 1, big - 1]), 1.0)
    assert bias.tolist() == [0.0, -1.0, 1.0]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=7))
def test_bias_against_arithmetic_with_integers(counts):
    bias = torch.zeros(len(counts))
    update_bias_(bias, torch.tensor(counts), 1.0)
    total, n = sum(counts), len(counts)
    assert bias.tolist() == [float((total > n * c) - (total < n * c)) for c in counts]


def test_skewed_logits_even_out():
    # aux-free balancing: MaxVio falls from window to window until it is near even

    g = torch.Generator().manual_seed(0)
    skew = torch.linspace(1.5, -1.5, 8)
    bias = torch.zeros(8)
    windows = []
    for _ in range(5):
        counts = torch.zeros(8, dtype=torch.int64)
        for _ in range(40):
            logits = torch.randn(256, 8, generator=g) + skew
            got = route(logits, k=2, score="sigmoid", normalize=True, bias=bias)
            step = torch.bincount(got.experts.flatten(), minlength=8)
            update_bias_(bias, step, 0.005)
            counts += step
        windows.append(load_figures(counts, counts).max_violation)
    assert windows[0] > 0.5
    assert all(later < earlier or later < 0.05 for earlier, later in pairwise(windows))
    assert windows[-1] < 0.1


def test_the_entropy_of_one_busy_expert_is_a_plain_zero():
    figures = load_figures(torch.tensor([5, 0]), torch.tensor([5, 0]))
    assert str(figures.entropy) == "0.0"
