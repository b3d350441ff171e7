from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesys.kernels.activation import activate, activate_backward, is_gated
from moesys.kernels.expert_mlp import expert_mlp
from moesys.kernels.expert_mlp.op import BLOCK_ROWS
from moesys.testing import oracles

NAMES = ["swiglu", "geglu", "gelu", "relu"]


def make(
    counts: list[int], width: int, inner: int, name: str, dtype=torch.float64, seed: int = 0
) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    first = 2 * inner if is_gated(name) else inner
    shapes = [
        (sum(counts), width),
        (len(counts), first, width),
        (len(counts), width, inner),
        (sum(counts), width),
    ]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def naive(rows: Tensor, w13: Tensor, w2: Tensor, counts: list[int], name: str) -> Tensor:
    hidden = oracles.activation(oracles.grouped_product(rows, w13, counts, True), name)
    return oracles.grouped_product(hidden, w2, counts, True)


def fast(rows: Tensor, w13: Tensor, w2: Tensor, counts: list[int], name: str) -> Tensor:
    """The same by matrices, for many rows."""
    parts = zip(rows.split(counts), w13, w2, strict=True)
    return torch.cat([oracles.activation(part @ one.T, name) @ two.T for part, one, two in parts])


def results(function, rows: Tensor, w13: Tensor, w2: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [value.detach().requires_grad_() for value in (rows, w13, w2)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(counts: list[int], width: int, inner: int, name: str, seed: int = 0, reference=naive) -> None:
    values = make(counts, width, inner, name, seed=seed)
    sizes = torch.tensor(counts)
    got = results(lambda a, b, c: expert_mlp(a, b, c, sizes, name), *values)
    want = results(lambda a, b, c: reference(a, b, c, counts, name), *values)
    for label, ours, right in zip(("out", "rows", "w13", "w2"), got, want, strict=True):
        limit = 1e-12 * max(1.0, float(right.abs().max()) if right.numel() else 1.0)
        torch.testing.assert_close(ours, right, atol=limit, rtol=0, msg=lambda m, n=label: f"{n}: {m}")
    for expert, count in enumerate(counts):
        if count == 0:
            assert (got[2][expert] == 0).all() and (got[3][expert] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 4, 0], [0, 0, 0], [6]])
def test_output_and_gradients(name, counts):
    check(counts, 6, 4, name)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    width=st.integers(1, 7),
    inner=st.integers(1, 7),
    name=st.sampled_from(NAMES),
)
def test_any_sizes(counts, width, inner, name):
    check(counts, width, inner, name)


@pytest.mark.parametrize(
    "counts", [[BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1], [3 * BLOCK_ROWS + 7, 0, 3], [2 * BLOCK_ROWS + 1]]
)
def test_more_rows_than_a_block(counts):
    check(counts, 8, 5, "swiglu", reference=fast)


def test_gradcheck():
    rows, w13, w2, _ = make([2, 0, 3], 3, 2, "swiglu")
    sizes = torch.tensor([2, 0, 3])
    leaves = [value.requires_grad_() for value in (rows, w13, w2)]
    assert torch.autograd.gradcheck(lambda a, b, c: expert_mlp(a, b, c, sizes, "swiglu"), leaves)


@pytest.mark.parametrize("layout", ["stride 0", "transposed"])
def test_layout_of_the_incoming_gradient(layout):
    rows, w13, w2, grad = make([3, 0, 5], 6, 4, "swiglu")
    grad = (
        torch.ones((), dtype=torch.float64).expand_as(grad)
        if layout == "stride 0"
        else grad.t().contiguous().t()
    )
    sizes = torch.tensor([3, 0, 5])
    got = results(lambda a, b, c: expert_mlp(a, b, c, sizes, "swiglu"), rows, w13, w2, grad)
    want = results(lambda a, b, c: naive(a, b, c, [3, 0, 5], "swiglu"), rows, w13, w2, grad)
    for ours, right in zip(got, want, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-11, rtol=0)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_only_the_wanted_gradients(wanted):
    *leaves, grad = make([2, 3], 6, 4, "swiglu")
    for index in wanted:
        leaves[index].requires_grad_()
    expert_mlp(*leaves, torch.tensor([2, 3]), "swiglu").backward(grad)
    assert [index for index, leaf in enumerate(leaves) if leaf.grad is not None] == list(wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
def test_low_precision(name, dtype, limit):
    # 2,000 rows of one expert: the gradients of its weights must not lose more than those of few rows do
    counts = [2000, 0, 40]
    values = make(counts, 16, 8, name, dtype)
    sizes = torch.tensor(counts)
    got = results(lambda a, b, c: expert_mlp(a, b, c, sizes, name), *values)
    want = results(lambda a, b, c: fast(a, b, c, counts, name), *(value.double() for value in values))
    for label, ours, right in zip(("out", "rows", "w13", "w2"), got, want, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - right).norm() / right.norm() < limit, label


def test_weight_gradients_are_rounded_once_in_bfloat16():
    # 16 blocks of rows that each add 1 to a gradient of 256, where bfloat16's spacing is 2
    rows = torch.zeros(17 * BLOCK_ROWS, 1)
    rows[:256] = 1.0
    rows[BLOCK_ROWS::BLOCK_ROWS] = 1.0
    rows = rows.to(torch.bfloat16).requires_grad_()
    w13 = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    w2 = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    expert_mlp(rows, w13, w2, torch.tensor([len(rows)]), "relu").sum().backward()
    assert w2.grad.item() == 272.0


def test_memory_full_of_nan_does_not_leak():
    # K2
    counts = [4, 0, 0, 9, 0]
    values = make(counts, 16, 8, "swiglu", torch.float32)
    for _ in range(3):
        dirt = [torch.full(value.shape, float("nan")) for value in values * 4]
        del dirt
        got = results(lambda a, b, c: expert_mlp(a, b, c, torch.tensor(counts), "swiglu"), *values)
        assert all(torch.isfinite(value).all() for value in got)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_backward_of_the_activation(name, dtype):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    y = x.double().clone().requires_grad_()
    want = oracles.activation(y, name)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    want.backward(grad.double())
    out, slope = activate_backward(x, grad, name)
    limit = {"atol": 1e-13, "rtol": 0} if dtype == torch.float64 else {"atol": 4e-2, "rtol": 1.6e-2}
    assert out.dtype == slope.dtype == dtype
    assert torch.equal(out, activate(x, name))
    torch.testing.assert_close(out.double(), want.detach(), **limit)
    torch.testing.assert_close(slope.double(), y.grad, **limit)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.zeros(5)},
        {"rows": torch.zeros(5, 4)},
        {"w2": torch.zeros(2, 3, 4)},
        {"w2": torch.zeros(1, 3, 2)},
        {"counts": torch.tensor([5])},
        {"activation": "gelu"},
    ],
)
def test_what_does_not_fit_is_a_value_error(change):
    fitting = {
        "rows": torch.zeros(5, 3),
        "w13": torch.zeros(2, 4, 3),
        "w2": torch.zeros(2, 3, 2),
        "counts": torch.tensor([2, 3]),
        "activation": "swiglu",
    }
    expert_mlp(**fitting)
    with pytest.raises(ValueError, match=r"rows \[R, D\], w13 \[E, 2F, D\]"):
        expert_mlp(**(fitting | change))


def test_counts_that_do_not_add_up_are_refused():
    rows, w13, w2 = torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match="counts sum to 2, but there are 3 rows"):
        expert_mlp(rows, w13, w2, torch.tensor([1, 1]), "swiglu")
