from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.models.config import ModelConfig
from moesys.routing.losses import (
    batch_load_balance,
    chosen_counts,
    one_hot_pairs,
    probability_sum,
    sequence_load_balance_sum,
    z_loss_sum,
)
from moesys.routing.token_choice import route
from moesys.testing import oracles


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sharp(experts: list[int], num_experts: int, high: float = 5.0, low: float = -5.0) -> Tensor:
    """Logits that name one expert per token."""
    logits = torch.full((len(experts), num_experts), low, dtype=torch.float64)
    return logits.scatter(1, torch.tensor(experts).unsqueeze(1), high)


def one_of(logits: Tensor, real: Tensor | None = None):
    return route(logits, k=1, score="softmax", normalize=False, real=real)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_against_the_loop(score, k, padded):
    sequences, length, num_experts = 3, 4, 5
    config = ModelConfig(num_experts=num_experts, top_k=k, router=score, normalize_weights=False)
    logits = draw(sequences * length, num_experts).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    bias = draw(num_experts, seed=1) * 0.2
    real = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool) if padded else None
    got = route(logits, k=k, score=score, normalize=False, bias=bias, real=real)
    tokens = [oracles.route_token(row, bias.tolist(), config) for row in other]
    rows = [
        [t for i, t in enumerate(tokens[start : start + length], start) if real is None or real[i]]
        for start in range(0, sequences * length, length)
    ]
    everything = [token for row in rows for token in row]

    assert chosen_counts(got).tolist() == oracles.load_counts(everything, num_experts)
    assert chosen_counts(got).dtype == torch.int64
    assert one_hot_pairs(got).sum(0).tolist() == oracles.load_counts(everything, num_experts)
    whole = batch_load_balance(probability_sum(got), chosen_counts(got), len(everything), k)
    pairs = {
        "sequence": (
            sequence_load_balance_sum(got, sequences),
            sum(oracles.load_balance(row, config) for row in rows if row),
        ),
        "batch": (whole, oracles.load_balance(everything, config)),
        "z": (z_loss_sum(got), oracles.z_loss_sum(everything)),
    }
    for name, (ours, right) in pairs.items():
        torch.testing.assert_close(ours, right, atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        left = torch.autograd.grad(ours, logits, retain_graph=True)[0]
        wanted = torch.autograd.grad(right, other, retain_graph=True)[0]
        torch.testing.assert_close(left, wanted, atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_padding_is_in_no_loss():
    # A1: 4 real tokens, one per expert, and 12 that all name expert 0
    logits = sharp([0, 1, 2, 3] + [0] * 12, 4)
    real = torch.arange(16) < 4
    without, masked = one_of(logits), one_of(logits, real)
    assert sequence_load_balance_sum(without, 1).item() == pytest.approx(2.687, abs=5e-4)
    assert sequence_load_balance_sum(masked, 1).item() == pytest.approx(1.0, abs=1e-12)
    assert batch_load_balance(
        probability_sum(without), chosen_counts(without), 16, 1
    ).item() == pytest.approx(2.687, abs=5e-4)
    assert batch_load_balance(probability_sum(masked), chosen_counts(masked), 4, 1).item() == pytest.approx(
        1.0
    )


def test_what_stands_in_the_padding_does_not_matter():
    real = torch.arange(16) < 4
    first, second = draw(16, 4), draw(16, 4)
    second[4:] = 100 * draw(12, 4, seed=9)
    one, two = one_of(first, real), one_of(second, real)
    assert torch.equal(sequence_load_balance_sum(one, 2), sequence_load_balance_sum(two, 2))
    assert torch.equal(probability_sum(one), probability_sum(two))
    assert torch.equal(z_loss_sum(one), z_loss_sum(two))
    assert torch.equal(chosen_counts(one), chosen_counts(two))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_even_load_is_one_whatever_k_and_score(score, k):
    # A4: f is divided by k. Token t prefers experts t, t+1, ... and every expert equally often.
    ramp = torch.linspace(2, -2, 8, dtype=torch.float64)
    logits = torch.stack([ramp.roll(t) for t in range(8)])
    got = route(logits, k=k, score=score, normalize=False)
    assert sequence_load_balance_sum(got, 1).item() == pytest.approx(1.0, abs=1e-12)
    assert batch_load_balance(probability_sum(got), chosen_counts(got), 8, k).item() == pytest.approx(1.0)


def test_scope_is_what_it_says():
    # A12: one sequence names expert 0 only, the other expert 1 only
    got = one_of(sharp([0] * 4 + [1] * 4, 2, high=20, low=-20))
    assert sequence_load_balance_sum(got, 2).item() / 2 == pytest.approx(2.0)
    assert batch_load_balance(probability_sum(got), chosen_counts(got), 8, 1).item() == pytest.approx(1.0)


@pytest.mark.parametrize("cuts", [[8], [2, 6], [1, 1, 2, 4]])
def test_parts_add_up_to_the_batch(cuts):
    logits = draw(8, 5).requires_grad_()
    whole = route(logits, k=2, score="softmax", normalize=False)
    total = chosen_counts(whole)
    want = batch_load_balance(probability_sum(whole), total, 8, 2)
    parts = [route(part, k=2, score="softmax", normalize=False) for part in logits.split(cuts)]
    got = sum(batch_load_balance(probability_sum(part), total, 8, 2) for part in parts)
    torch.testing.assert_close(got, want, atol=1e-13, rtol=0)
    torch.testing.assert_close(
        torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, logits)[0], atol=1e-13, rtol=0
    )


def test_z_loss_sees_the_logits():
    # A18: a shift changes no probability, but the z-loss
    logits = draw(6, 4)
    before, after = z_loss_sum(one_of(logits)), z_loss_sum(one_of(logits + 10))
    lse = logits.logsumexp(-1)
    assert after.item() == pytest.approx(float(((lse + 10) ** 2).sum()))
    assert after > before


def test_the_bias_changes_the_counts_but_not_the_probabilities():
    logits = draw(6, 4)
    arguments = {"k": 1, "score": "sigmoid", "normalize": False}
    plain = route(logits, **arguments)
    biased = route(logits, bias=torch.tensor([9.0, 0, 0, 0]), **arguments)
    assert chosen_counts(biased).tolist() == [6, 0, 0, 0]
    assert torch.equal(probability_sum(plain), probability_sum(biased))


def test_no_tokens():
    got = route(torch.zeros(0, 4, requires_grad=True), k=2, score="softmax", normalize=True)
    for value in (sequence_load_balance_sum(got, 0), z_loss_sum(got), probability_sum(got).sum()):
        assert value.item() == 0
    assert chosen_counts(got).tolist() == [0] * 4


def test_a_sequence_of_padding_adds_nothing():
    logits = draw(8, 4).requires_grad_()
    real = torch.arange(8) < 4
    got = one_of(logits, real)
    alone = one_of(logits[:4])
    torch.testing.assert_close(sequence_load_balance_sum(got, 2), sequence_load_balance_sum(alone, 1))
    sequence_load_balance_sum(got, 2).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[4:] == 0).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_only_the_probabilities_carry_gradient(score):
    logits = draw(8, 4).requires_grad_()
    got = route(logits, k=2, score=score, normalize=True)
    assert not one_hot_pairs(got).requires_grad
    f = one_hot_pairs(got).sum(0) / 8
    want = torch.autograd.grad((f * got.probabilities.sum(0) / 8).sum() * 2, logits, retain_graph=True)[0]
    ours = torch.autograd.grad(sequence_load_balance_sum(got, 1), logits)[0]
    torch.testing.assert_close(ours, want, atol=1e-14, rtol=0)
