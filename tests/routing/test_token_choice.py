from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesys.models.config import ModelConfig
from moesys.routing.group_limited import limit_to_groups
from moesys.routing.token_choice import route, top_k_stable
from moesys.testing.oracles import choose_experts, route_token

GROUPED = [
    (1, 1, "max"),
    (1, 1, "top2"),
    (4, 2, "max"),
    (4, 2, "top2"),
    (2, 1, "top2"),
    (8, 3, "max"),
    (4, 4, "top2"),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups", "group_score"), GROUPED)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_against_the_loop(score, normalize, num_groups, top_groups, group_score, with_bias, k):
    config = ModelConfig(
        num_experts=16,
        top_k=k,
        router=score,
        normalize_weights=normalize,
        route_scale=2.5,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
    )
    logits = draw(20, 16).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    bias = draw(16, seed=1) * 0.3 if with_bias else None
    got = route(
        logits,
        k=k,
        score=score,
        normalize=normalize,
        scale=2.5,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
    )
    want = [route_token(row, None if bias is None else bias.tolist(), config) for row in other]
    weights = torch.stack([torch.stack(token.weights) for token in want])
    probabilities = torch.stack([token.probabilities for token in want])
    assert got.experts.tolist() == [token.experts for token in want]
    assert got.kept is None and got.real is None and got.num_experts == 16
    torch.testing.assert_close(got.weights, weights, atol=1e-14, rtol=0)
    torch.testing.assert_close(got.probabilities, probabilities, atol=1e-14, rtol=0)
    assert torch.equal(got.logits, logits)
    pull, push = draw(20, k, seed=2), draw(20, 16, seed=3)
    ours = torch.autograd.grad((got.weights * pull).sum() + (got.probabilities * push).sum(), logits)
    right = torch.autograd.grad((weights * pull).sum() + (probabilities * push).sum(), other)
    torch.testing.assert_close(ours, right, atol=1e-13, rtol=0)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_groups=st.sampled_from([2, 3, 6]),
    top_groups=st.integers(1, 3),
    group_score=st.sampled_from(["max", "top2"]),
    levels=st.integers(2, 5),
)
def test_groups_equal_brute_force(seed, num_groups, top_groups, group_score, levels):
    # few levels make many ties; integers are exact
    top_groups = min(top_groups, num_groups)
    scores = torch.randint(levels, (4, 12), generator=torch.Generator().manual_seed(seed)).double()
    limited = limit_to_groups(scores, num_groups, top_groups, group_score)
    size = 12 // num_groups
    for row, out in zip(scores.tolist(), limited.tolist(), strict=True):
        parts = [sorted(row[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
        worth = [sum(part[: 1 if group_score == "max" else 2]) for part in parts]
        best = max(
            combinations(range(num_groups), top_groups),
            key=lambda c: (sum(worth[g] for g in c), tuple(-g for g in c)),
        )
        for expert, value in enumerate(out):
            assert value == (row[expert] if expert // size in best else float("-inf"))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 8), levels=st.integers(1, 4))
def test_ties_go_to_the_lower_index(seed, k, levels):
    scores = torch.randint(levels, (5, 8), generator=torch.Generator().manual_seed(seed)).float()
    assert top_k_stable(scores, k).tolist() == [choose_experts(row, k) for row in scores.tolist()]


def test_all_equal():
    # R4: torch.topk answers [6, 5]
    assert top_k_stable(torch.zeros(1, 8), 2).tolist() == [[0, 1]]
    got = route(torch.zeros(3, 8), k=2, score="softmax", normalize=True, num_groups=4, top_groups=2)
    assert got.experts.tolist() == [[0, 1]] * 3
    assert got.weights.tolist() == [[0.5, 0.5]] * 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    order=st.permutations(range(6)),
    score=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
)
def test_renaming_the_experts_renames_the_result(seed, order, score, normalize):
    logits, bias = draw(7, 6, seed=seed), draw(6, seed=seed + 1)
    settings_ = {"k": 3, "score": score, "normalize": normalize}
    first = route(logits, bias=bias, **settings_)
    second = route(logits[:, order], bias=bias[list(order)], **settings_)
    names = torch.tensor(order)
    assert torch.equal(names[second.experts], first.experts)
    torch.testing.assert_close(second.weights, first.weights, atol=1e-14, rtol=0)
    torch.testing.assert_close(second.probabilities, first.probabilities[:, order], atol=1e-14, rtol=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(4)))
def test_renaming_whole_groups_renames_the_result(seed, order):
    logits = draw(7, 12, seed=seed)
    names = torch.arange(12).view(4, 3)[list(order)].flatten()
    arguments = {"k": 4, "score": "sigmoid", "normalize": True, "num_groups": 4, "top_groups": 2}
    first, second = route(logits, **arguments), route(logits[:, names], **arguments)
    assert torch.equal(names[second.experts], first.experts)
    for row in first.experts // 3:
        assert len(row.unique()) <= 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_selects_and_does_nothing_else(score):
    logits = draw(10, 6).requires_grad_()
    arguments = {"k": 2, "score": score, "normalize": True}
    plain = route(logits, **arguments)
    shifted = route(logits, bias=torch.full((6,), 5.0, dtype=torch.float64), **arguments)  # B7
    assert torch.equal(plain.experts, shifted.experts)
    assert torch.equal(plain.weights, shifted.weights)
    assert torch.equal(plain.probabilities, shifted.probabilities)
    bias = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    pushed = route(logits, bias=bias + torch.tensor([0.0, 0, 0, 9, 8, 0]), **arguments)
    assert pushed.experts.tolist() == [[3, 4]] * 10
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    want = scores[:, 3:5] / scores[:, 3:5].sum(-1, keepdim=True)
    torch.testing.assert_close(pushed.weights, want, atol=1e-14, rtol=0)
    (pushed.weights * draw(10, 2, seed=1)).sum().backward()
    assert bias.grad is None


def test_one_choice_normalised_is_one():
    # R3: the sum is over the choices, not over the tokens
    got = route(draw(5, 4), k=1, score="sigmoid", normalize=True)
    assert torch.equal(got.weights, torch.ones(5, 1, dtype=torch.float64))


def test_one_choice_of_softmax_keeps_its_gradient():
    # R1
    logits = draw(5, 4).requires_grad_()
    got = route(logits, k=1, score="softmax", normalize=False)
    got.weights.sum().backward()
    assert logits.grad.abs().max() > 1e-3


def test_all_experts_chosen():
    got = route(draw(5, 4), k=4, score="softmax", normalize=False)
    assert [sorted(row) for row in got.experts.tolist()] == [[0, 1, 2, 3]] * 5
    torch.testing.assert_close(got.weights.sum(1), torch.ones(5, dtype=torch.float64))


def test_no_tokens():
    got = route(torch.zeros(0, 4), k=2, score="sigmoid", normalize=True, num_groups=2, top_groups=1)
    assert got.experts.shape == got.weights.shape == (0, 2)
    assert got.probabilities.shape == (0, 4)


def test_padding_is_not_kept():
    real = torch.tensor([True, False, True])
    got = route(draw(3, 4), k=2, score="softmax", normalize=True, real=real)
    assert got.kept.tolist() == [[True, True], [False, False], [True, True]]


def test_a_given_selection_is_replayed():
    chosen = torch.tensor([[3, 0], [1, 2], [0, 1]])
    logits = draw(3, 4)
    got = route(logits, k=2, score="sigmoid", normalize=False, bias=draw(4, seed=1), chosen=chosen)
    assert torch.equal(got.experts, chosen)
    torch.testing.assert_close(got.weights, logits.sigmoid().gather(1, chosen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32(dtype):
    logits = draw(6, 8).to(dtype)
    low, full = (route(x, k=2, score="softmax", normalize=True) for x in (logits, logits.float()))
    assert low.logits.dtype == low.weights.dtype == low.probabilities.dtype == torch.float32
    assert torch.equal(low.weights, full.weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_extreme_logits_stay_finite(score):
    logits = torch.tensor([[-200.0, -200, -200, -200], [200, 200, 200, 200], [200, -200, 0, 0]])
    logits.requires_grad_()
    got = route(logits, k=2, score=score, normalize=True)
    (got.weights.sum() + got.probabilities.square().sum()).backward()
    for value in (got.weights, got.probabilities, logits.grad):
        assert torch.isfinite(value).all()
