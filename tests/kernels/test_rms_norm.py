from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.kernels.rms_norm import rms_norm
from moesys.testing import oracles


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(x: Tensor, weight: Tensor, grad: Tensor) -> None:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y, other = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out, want = rms_norm(x, weight, 1e-5), oracles.rms_norm(y, other, 1e-5)
    torch.testing.assert_close(out, want, atol=1e-13, rtol=0)
    out.backward(grad), want.backward(grad)
    torch.testing.assert_close(x.grad, y.grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(weight.grad, other.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 6), (2, 2, 3, 4), (3, 1), (0, 4), (7,)])
def test_value_and_gradients(shape):
    compare(draw(*shape), draw(shape[-1], seed=1), draw(*shape, seed=2))


@pytest.mark.parametrize(
    "layout", ["transposed input", "sliced input", "transposed gradient", "stride 0 gradient"]
)
def test_layouts(layout):
    x, weight, grad = draw(4, 5, 6), draw(6, seed=1), draw(4, 5, 6, seed=2)
    match layout:
        case "transposed input":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        case "sliced input":
            x = torch.cat([x, x], dim=2)[..., 3:9]
        case "transposed gradient":
            grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
        case "stride 0 gradient":
            grad = torch.ones((), dtype=torch.float64).expand_as(x)
    compare(x, weight, grad)


def test_gradcheck():
    x, weight = draw(3, 4).requires_grad_(), draw(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3), (x, weight))


def test_only_the_wanted_gradient():
    x, weight = draw(3, 4).requires_grad_(), draw(4, seed=1)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None
    weight.requires_grad_()
    rms_norm(x.detach(), weight, 1e-6).sum().backward()
    assert weight.grad is not None


def test_zero_row_and_epsilon():
    x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    out = rms_norm(x, torch.full((4,), 2.0, dtype=torch.float64), 0.25)
    out.sum().backward()
    assert out.tolist() == [[0.0] * 4]
    assert x.grad.tolist() == [[4.0] * 4]  # 2 / sqrt(0.25)


def test_bfloat16_rounds_once():
    # computed in float32: the only rounding is that of the result, half an ulp = 2^-9 relative
    x = draw(64, 48).to(torch.bfloat16).requires_grad_()
    weight = (1 + 0.3 * draw(48, seed=1)).to(torch.bfloat16).requires_grad_()
    grad = draw(64, 48, seed=2).to(torch.bfloat16)
    y, other = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    out, want = rms_norm(x, weight, 1e-6), oracles.rms_norm(y, other, 1e-6)
    assert out.dtype == torch.bfloat16
    out.backward(grad), want.backward(grad.double())
    for ours, right in ((out, want), (x.grad, y.grad), (weight.grad, other.grad)):
        torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=2**-8)


def test_float32_does_not_overflow_on_bfloat16_range():
    x = torch.full((1, 4), 3e18, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.bfloat16), 1e-6), torch.ones_like(x))
