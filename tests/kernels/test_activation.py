from __future__ import annotations

import pytest
import torch

from moesys.kernels.activation import activate, is_gated
from moesys.testing import oracles

NAMES = ["swiglu", "geglu", "gelu", "relu"]


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 6), (0, 4), (1, 2)])
def test_value_and_gradient(name, shape):
    x = inputs(*shape).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, want = activate(x, name), oracles.activation(y, name)
    assert out.shape == (*shape[:-1], shape[-1] // 2 if is_gated(name) else shape[-1])
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    grad = inputs(*out.shape, seed=1)
    out.backward(grad), want.backward(grad)
    torch.testing.assert_close(x.grad, y.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(lambda x: activate(x, name), (inputs(3, 4).requires_grad_(),))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["stride 0", "transposed", "strided input"])
def test_layouts(name, layout):
    x = inputs(6, 8)
    if layout == "strided input":
        x = torch.cat([x, x], dim=1)[:, 4:12]
    x = x.detach().requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, want = activate(x, name), oracles.activation(y, name)
    grad = inputs(*out.shape, seed=1)
    if layout == "stride 0":
        grad = torch.ones((), dtype=torch.float64).expand_as(out)
    elif layout == "transposed":
        grad = grad.t().contiguous().t()
    out.backward(grad), want.backward(grad)
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    torch.testing.assert_close(x.grad, y.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    x = inputs(64, 32).to(torch.bfloat16).requires_grad_()
    y = x.detach().double().requires_grad_()
    out, want = activate(x, name), oracles.activation(y, name)
    out.sum().backward(), want.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1.2e-2)
    torch.testing.assert_close(x.grad.double(), y.grad, atol=1.5e-2, rtol=1.2e-2)


def test_large_values_stay_finite():
    x = torch.tensor([[-1e4, 1e4, 3.0, 3.0]]).requires_grad_()
    out = activate(x, "swiglu")
    assert out.tolist() == [[0.0, 3e4]]
    out.sum().backward()
    assert x.grad.tolist() == [[0.0, 3.0, 0.0, 1e4]]


def test_the_input_is_not_changed():
    for name in NAMES:
        x = inputs(3, 4).requires_grad_()
        before = x.detach().clone()
        activate(x, name).sum().backward()
        assert torch.equal(x, before)
