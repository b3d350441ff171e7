from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesys.kernels.permute import permute, sort_pairs, unpermute


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 6))
    choices = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(0, 7))
    row = st.permutations(range(num_experts)).map(lambda order: order[:choices])
    experts = [draw(row) for _ in range(num_tokens)]
    kept = None
    if draw(st.booleans()):
        kept = [[draw(st.booleans()) for _ in range(choices)] for _ in range(num_tokens)]
    return num_experts, choices, experts, kept


def as_tensors(routing) -> tuple[Tensor, int, Tensor | None]:
    num_experts, choices, experts, kept = routing
    shape = (len(experts), choices)
    mask = None if kept is None else torch.tensor(kept, dtype=torch.bool).reshape(shape)
    return torch.tensor(experts, dtype=torch.int64).reshape(shape), num_experts, mask


def sorted_pairs(routing) -> list[tuple[int, int, int]]:
    """(expert, token, choice) of the kept pairs, in the order that their rows must have."""
    _, _, experts, kept = routing
    return sorted(
        (expert, token, choice)
        for token, row in enumerate(experts)
        for choice, expert in enumerate(row)
        if kept is None or kept[token][choice]
    )


@settings(max_examples=150, deadline=None)
@given(routings())
def test_order(routing):
    num_experts, choices, experts, _ = routing
    permutation = sort_pairs(*as_tensors(routing))
    pairs = sorted_pairs(routing)
    assert permutation.tokens.tolist() == [token for _, token, _ in pairs]
    assert permutation.pairs.tolist() == [token * choices + choice for _, token, choice in pairs]
    assert permutation.counts.tolist() == [
        sum(e == expert for e, _, _ in pairs) for expert in range(num_experts)
    ]
    where = {(token, choice): row for row, (_, token, choice) in enumerate(pairs)}
    assert permutation.rows.tolist() == [
        [where.get((token, choice), len(pairs)) for choice in range(choices)] for token in range(len(experts))
    ]
    for tensor in (permutation.tokens, permutation.pairs, permutation.counts, permutation.rows):
        assert tensor.dtype == torch.int64


@settings(max_examples=100, deadline=None)
@given(routings(), st.integers(0, 1000))
def test_values_and_gradients(routing, seed):
    experts, num_experts, kept = as_tensors(routing)
    pairs = sorted_pairs(routing)
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    x, scale, weights = leaf(len(experts), 3), leaf(len(pairs), 3), leaf(*experts.shape)
    permutation = sort_pairs(experts, num_experts, kept)
    rows = permute(x, permutation)
    out = unpermute(rows * scale, weights, permutation)

    right = [torch.zeros(3, dtype=torch.float64) for _ in range(len(experts))]
    for row, (_, token, choice) in enumerate(pairs):
        right[token] = right[token] + weights[token, choice] * (x[token] * scale[row])
        assert torch.equal(rows[row], x[token])
    want = torch.stack(right) if right else torch.zeros(0, 3, dtype=torch.float64)
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    if pairs:
        grad = torch.randn(out.shape, generator=g, dtype=torch.float64)
        ours = torch.autograd.grad(out, (x, scale, weights), grad)
        theirs = torch.autograd.grad(want, (x, scale, weights), grad)
        for left, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, expected, atol=1e-13, rtol=0)


def test_gradcheck_with_drops():
    permutation = sort_pairs(
        torch.tensor([[0, 1], [1, 2], [2, 0]]), 3, torch.tensor([[True, False], [True, True], [False, False]])
    )
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, generator=g, dtype=torch.float64).requires_grad_()
    rows = torch.randn(3, 2, generator=g, dtype=torch.float64).requires_grad_()
    weights = torch.randn(3, 2, generator=g, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: permute(x, permutation), (x,))
    assert torch.autograd.gradcheck(lambda r, w: unpermute(r, w, permutation), (rows, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nan_of_a_dropped_pair_stays_out(dtype):
    # R8: a token without a kept pair gets exactly 0, whatever stands in its vector and its weights
    kept = torch.tensor([[True, True], [False, False], [True, False]])
    permutation = sort_pairs(torch.tensor([[0, 1], [1, 0], [1, 0]]), 2, kept)
    x = torch.ones(3, 4, dtype=dtype)
    x[1] = float("nan")
    weights = torch.full((3, 2), 0.5)
    weights[~kept] = float("nan")
    x.requires_grad_(), weights.requires_grad_()
    rows = permute(x, permutation)
    assert torch.isfinite(rows).all()
    out = unpermute(rows, weights, permutation)
    assert torch.equal(out, torch.tensor([[1.0], [0.0], [0.5]], dtype=dtype).expand(3, 4))
    grad_x, grad_weights = torch.autograd.grad(out.sum(), (x, weights))
    assert torch.equal(grad_x, out.detach())
    assert torch.equal(grad_weights, torch.where(kept, 4.0, 0.0))


def test_nothing_routed():
    permutation = sort_pairs(torch.tensor([[0], [1]]), 2, torch.zeros(2, 1, dtype=torch.bool))
    x, weights = torch.ones(2, 3).requires_grad_(), torch.ones(2, 1).requires_grad_()
    rows = permute(x, permutation)
    out = unpermute(rows, weights, permutation)
    assert rows.shape == (0, 3)
    assert torch.equal(out, torch.zeros(2, 3))
    for gradient in torch.autograd.grad(out.sum(), (x, weights)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("layout", ["stride 0", "transposed"])
def test_layout_of_the_incoming_gradient(layout):
    permutation = sort_pairs(torch.tensor([[0, 1], [1, 0]]), 2)
    x, weights = torch.rand(2, 4).requires_grad_(), torch.rand(2, 2).requires_grad_()
    grad = torch.ones(()).expand(2, 4) if layout == "stride 0" else torch.rand(4, 2).t()
    out = unpermute(permute(x, permutation), weights, permutation)
    got = torch.autograd.grad(out, (x, weights), grad)
    want = torch.autograd.grad(x * weights.sum(1, keepdim=True), (x, weights), grad)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right)


def test_sums_run_in_float32():
    # 1024 choices of 1/1024 each: bfloat16 sums would stop at 1/2, where 1/1024 is below half an ulp
    choices = 1024
    permutation = sort_pairs(torch.arange(choices).unsqueeze(0), choices)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = permute(x, permutation)
    out = unpermute(rows, torch.full((1, choices), 1 / choices), permutation)
    assert out.dtype == torch.bfloat16
    assert out.item() == 1.0
    (grad,) = torch.autograd.grad(rows, x, torch.full((choices, 1), 1 / choices, dtype=torch.bfloat16))
    assert grad.item() == 1.0


def test_same_bits_every_time():
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(500, 8, generator=g)
    permutation = sort_pairs(scores.topk(4).indices, 8)
    x = torch.randn(500, 32, generator=g).requires_grad_()
    weights = torch.rand(500, 4, generator=g).requires_grad_()

    def once() -> tuple[Tensor, ...]:
        out = unpermute(permute(x, permutation), weights, permutation)
        return out, *torch.autograd.grad(out.square().sum(), (x, weights))

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))
