from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesys.generation.sampling import Sampling, draw_keys, sample, uniform

finite = st.floats(-30, 30)
rows = st.lists(finite, min_size=1, max_size=12)
unit = st.floats(0, 1, exclude_max=True)


def reference(logits: list[float], sampling: Sampling) -> list[float]:
    """Probability of every token, by plain arithmetic."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: sampling.top_k]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        if mass / total >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.3),
        Sampling(temperature=2.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=1.0, top_k=4, top_p=0.8),
        Sampling(temperature=1.0, top_k=99),
    ],
)
def test_shares_over_all_uniforms_are_the_probabilities(sampling: Sampling) -> None:
    logits = [0.3, -1.0, 2.0, 0.3, 1.1, -4.0]
    n = 20_000
    drawn = sample(torch.tensor(logits).expand(n, -1), sampling, [(i + 0.5) / n for i in range(n)])
    shares = torch.bincount(drawn, minlength=len(logits)) / n
    assert shares.tolist() == pytest.approx(reference(logits, sampling), abs=2 / n)


@given(rows, unit, st.floats(1e-3, 10), st.integers(1, 14), st.floats(1e-6, 1))
def test_a_token_outside_the_filters_is_never_drawn(logits, u, temperature, top_k, top_p) -> None:
    """The cut by probability is judged with a margin for rounding."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = int(sample(torch.tensor([logits], dtype=torch.float64), sampling, [u]))
    wider = Sampling(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-9))
    assert reference(logits, wider)[token] > 0


@given(rows, unit)
def test_temperature_zero_takes_the_first_largest(logits, u) -> None:
    token = sample(torch.tensor([logits], dtype=torch.float64), Sampling(temperature=0.0), [u])
    assert int(token) == logits.index(max(logits))


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float, u: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert int(sample(logits, Sampling(temperature=temperature), [u])) == 1


def test_rows_are_independent() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    uniforms = [0.1, 0.9, 0.5, 0.3, 0.7]
    sampling = Sampling(temperature=1.0, top_p=0.9)
    together = sample(logits, sampling, uniforms).tolist()
    assert together == [int(sample(logits[i : i + 1], sampling, uniforms[i : i + 1])) for i in range(5)]


def test_draws_are_uniform() -> None:
    key = draw_keys([[1, 2]], seed=0)[0]
    draws = torch.tensor([uniform(key, position) for position in range(4000)], dtype=torch.float64)
    assert draws.min() >= 0 and draws.max() < 1
    # the largest gap between the empirical and the true distribution; 1.95 / sqrt(n) is passed once in 1,000
    gap = (draws.sort().values - (torch.arange(4000) + 0.5) / 4000).abs().max()
    assert gap < 1.95 / math.sqrt(4000)


def test_keys_depend_on_seed_prompt_and_repetition_only() -> None:
    a, b, again = draw_keys([[1], [2], [1]], seed=0)
    assert len({a, b, again}) == 3
    assert draw_keys([[2], [1], [1]], seed=0) == [b, a, again]
    assert draw_keys([[2]], seed=0) == [b]
    assert draw_keys([[2]], seed=1) != [b]


def test_every_bad_value_is_told() -> None:
    problems = Sampling(temperature=-1.0, top_k=0, top_p=1.5).problems()
    assert [text.split()[0] for text in problems] == ["--temperature", "--top-k", "--top-p"]
    assert Sampling(temperature=math.nan).problems() and Sampling(temperature=math.inf).problems()
    assert Sampling(top_p=0.0).problems() and Sampling(top_p=math.nan).problems()
    assert not Sampling(temperature=0.0, top_k=1, top_p=1.0).problems()
