from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesys.kernels.grouped_gemm import gmm, gmm_reference
from moesys.testing.oracles import grouped_product

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GROUPS = {
    "mixed": [3, 0, 5, 1],
    "empty at both ends": [0, 4, 0],
    "one has everything": [0, 0, 7, 0],
    "no rows": [0, 0, 0],
    "one group": [6],
}


def make(sizes: list[int], m: int, n: int, trans_b: bool, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(sum(sizes), m, generator=g, dtype=torch.float64)
    b = torch.randn(len(sizes), *((n, m) if trans_b else (m, n)), generator=g, dtype=torch.float64)
    grad = torch.randn(sum(sizes), n, generator=g, dtype=torch.float64)
    return [a.to(dtype), b.to(dtype), grad.to(dtype)]


def run(function, a: Tensor, b: Tensor, grad: Tensor) -> list[Tensor]:
    a, b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    out = function(a, b)
    out.backward(grad)
    return [out.detach(), a.grad, b.grad]


def check(a: Tensor, b: Tensor, grad: Tensor, sizes: list[int], trans_b: bool, backend: str | None) -> None:
    """Output and both gradients against the loop over rows in float64."""
    counts = torch.tensor(sizes)
    got = run(lambda x, y: gmm(x, y, counts, trans_b, backend=backend), a, b, grad)
    want = run(lambda x, y: grouped_product(x, y, sizes, trans_b), a.double(), b.double(), grad.double())
    for name, ours, right in zip(("out", "grad a", "grad b"), got, want, strict=True):
        assert ours.dtype == a.dtype, name
        assert ours.shape == right.shape, name
        limit = TOLERANCE[a.dtype] * max(1.0, float(right.abs().max()) if right.numel() else 1.0)
        torch.testing.assert_close(
            ours.double(), right, atol=limit, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    for group, size in enumerate(sizes):
        if size == 0:
            assert torch.equal(got[2][group], torch.zeros_like(got[2][group]))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float64, None),
        (torch.float64, "loop"),
        (torch.float32, None),
        (torch.float32, "loop"),
        (torch.float32, "torch"),
        (torch.bfloat16, None),
        (torch.bfloat16, "loop"),
        (torch.bfloat16, "torch"),
        (torch.float16, None),
    ],
)
def test_output_and_gradients(dtype, backend, sizes, trans_b):
    check(*make(sizes, 16, 8, trans_b, dtype), sizes, trans_b, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("m", "n"), [(3, 5), (1, 1), (8, 5), (5, 8), (130, 66)])
def test_widths_that_are_no_multiple_of_16_bytes(dtype, trans_b, m, n):
    sizes = [2, 0, 4]
    check(*make(sizes, m, n, trans_b, dtype), sizes, trans_b, None)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    trans_b=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_any_sizes(sizes, m, n, trans_b, dtype):
    check(*make(sizes, m, n, trans_b, dtype), sizes, trans_b, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("layout", ["stride 0", "transposed", "every second column", "offset"])
def test_layout_of_the_incoming_gradient(dtype, trans_b, layout):
    sizes = [3, 0, 5]
    a, b, grad = make(sizes, 8, 8, trans_b, dtype)
    if layout == "stride 0":
        grad = torch.ones((), dtype=dtype).expand_as(grad)
    elif layout == "transposed":
        grad = grad.t().contiguous().t()
    elif layout == "every second column":
        grad = torch.stack([grad, grad], dim=2).flatten(1)[:, ::2]
    else:
        grad = torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view_as(grad)
    check(a, b, grad, sizes, trans_b, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trans_b", [False, True])
def test_layout_of_the_arguments(dtype, trans_b):
    sizes = [3, 0, 5]
    a, b, _grad = make(sizes, 8, 8, trans_b, dtype)
    strided = torch.cat([a, a], dim=1)[:, 8:]
    transposed = b.transpose(1, 2).contiguous().transpose(1, 2)
    offset = torch.cat([a.new_zeros(1), a.flatten()])[1:].view_as(a)
    for left, right in ((strided, b), (a.t().contiguous().t(), b), (a, transposed), (offset, b)):
        got = gmm(left, right, torch.tensor(sizes), trans_b)
        want = grouped_product(a.double(), b.double(), sizes, trans_b)
        torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype] * 20, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size_dtype", [torch.int64, torch.int32])
def test_memory_full_of_nan_does_not_leak(dtype, size_dtype):
    # K2: the allocator hands back what was freed just now
    sizes = [4, 0, 0, 9, 0]
    a, b, grad = make(sizes, 16, 24, True, dtype)
    a.requires_grad_(), b.requires_grad_()
    for _ in range(3):
        dirt = [torch.full(shape, float("nan"), dtype=dtype) for shape in (a.shape, b.shape, grad.shape) * 4]
        del dirt
        out = gmm(a, b, torch.tensor(sizes, dtype=size_dtype), True)
        grad_a, grad_b = torch.autograd.grad(out, (a, b), grad)
        for value in (out, grad_a, grad_b):
            assert torch.isfinite(value).all()
        assert (grad_b[[1, 2, 4]] == 0).all()


def test_only_the_wanted_gradient():
    a, b, grad = make([2, 3], 8, 8, False, torch.float32)
    for wants in ((True, False), (False, True)):
        x, y = a.clone().requires_grad_(wants[0]), b.clone().requires_grad_(wants[1])
        gmm(x, y, torch.tensor([2, 3])).backward(grad)
        assert (x.grad is not None, y.grad is not None) == wants


def test_gradcheck():
    sizes = torch.tensor([2, 0, 3])
    for trans_b in (False, True):
        a, b, _ = make([2, 0, 3], 3, 4, trans_b, torch.float64)
        assert torch.autograd.gradcheck(
            lambda x, y, t=trans_b: gmm(x, y, sizes, t), (a.requires_grad_(), b.requires_grad_())
        )


def test_the_shipped_reference_is_the_loop():
    for trans_b in (False, True):
        a, b, _ = make([2, 0, 3], 3, 4, trans_b, torch.float64)
        got = gmm_reference(a, b, torch.tensor([2, 0, 3]), trans_b)
        torch.testing.assert_close(got, grouped_product(a, b, [2, 0, 3], trans_b), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(5)}, "a [R, M]"),
        ({"a": torch.zeros(5, 4)}, "width 4"),
        ({"a": torch.zeros(5, 3, dtype=torch.float64)}, "one dtype"),
        ({"b": torch.zeros(3, 4)}, "b [E, M, N]"),
        ({"batch_sizes": torch.tensor([2, 3, 0])}, "batch_sizes [E]"),
        ({"batch_sizes": torch.tensor(5)}, "batch_sizes [E]"),
        ({"trans_b": True}, "trans_b=True"),
    ],
)
def test_what_does_not_fit_is_a_value_error(change, words):
    arguments = {"a": torch.zeros(5, 3), "b": torch.zeros(2, 3, 4), "batch_sizes": torch.tensor([2, 3])}
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        gmm(**(arguments | change))
