from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesys.kernels.cross_entropy import IGNORE, linear_cross_entropy
from moesys.testing import oracles


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = [3, IGNORE, 0, 6, IGNORE, 2, 2, IGNORE]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 1024])
@pytest.mark.parametrize("labels", [LABELS, [IGNORE] * 8, [1] * 8], ids=["some", "none", "all"])
def test_value_and_gradients(chunk, labels):
    hidden, weight = draw(8, 5).requires_grad_(), draw(7, 5, seed=1).requires_grad_()
    h, w = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.tensor(labels), chunk)
    want = oracles.cross_entropy_sum(h, w, labels)
    torch.testing.assert_close(loss, want, atol=1e-12, rtol=0)
    (loss * 0.37).backward(), (want * 0.37).backward()
    torch.testing.assert_close(hidden.grad, h.grad, atol=1e-13, rtol=0)
    torch.testing.assert_close(weight.grad, w.grad, atol=1e-13, rtol=0)


def test_gradcheck():
    labels = torch.tensor([2, IGNORE, 0, 1])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, 3),
        (draw(4, 3).requires_grad_(), draw(3, 3, seed=1).requires_grad_()),
    )


def test_no_tokens():
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.ones(7, 5, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.shape == (0, 5)
    assert torch.equal(weight.grad, torch.zeros(7, 5))


def test_weight_that_is_also_the_embedding():
    tokens, labels = torch.tensor([1, 4, 2, 2]), [4, 2, IGNORE, 0]
    weight = draw(6, 5).requires_grad_()
    other = weight.detach().clone().requires_grad_()
    loss = linear_cross_entropy(torch.tanh(weight[tokens]), weight, torch.tensor(labels), 3)
    want = oracles.cross_entropy_sum(torch.tanh(other[tokens]), other, labels)
    loss.backward(), want.backward()
    torch.testing.assert_close(weight.grad, other.grad, atol=1e-13, rtol=0)


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_only_the_wanted_gradient(wants):
    hidden, weight = draw(4, 3).requires_grad_(wants[0]), draw(5, 3).requires_grad_(wants[1])
    linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3])).backward()
    assert (hidden.grad is not None, weight.grad is not None) == wants


def test_layout_of_the_arguments():
    hidden = draw(5, 8).t().requires_grad_()
    weight = draw(5, 7, seed=1).t().requires_grad_()
    want = oracles.cross_entropy_sum(hidden, weight, LABELS)
    right = torch.autograd.grad(want, (hidden, weight))
    got = torch.autograd.grad(linear_cross_entropy(hidden, weight, torch.tensor(LABELS), 3), (hidden, weight))
    for ours, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)


def test_large_logits():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]))
    assert loss.item() == 1000.0
    loss.backward()
    assert hidden.grad.tolist() == [[0.0], [-1.0]]


def test_bfloat16():
    hidden = (draw(64, 16) * 0.5).to(torch.bfloat16).requires_grad_()
    weight = (draw(40, 16, seed=1) * 0.5).to(torch.bfloat16).requires_grad_()
    labels = torch.arange(64) % 40
    labels[::5] = IGNORE
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, 24)
    want = F.cross_entropy(h @ w.t(), labels, reduction="sum", ignore_index=IGNORE)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, atol=0, rtol=1e-2)
    loss.backward(), want.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for ours, right in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        error = (ours.double() - right).norm() / right.norm()
        assert error < 1e-2


class _Largest(TorchDispatchMode):
    """Notes the most elements that any result had, and the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_the_whole_logits_never_exist():
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    with _Largest() as seen:
        linear_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.int64), 8).backward()
    assert seen.elements <= 8 * 50


def test_without_gradient_only_the_logits_are_computed():
    # evaluation must not pay for gradients that nobody takes
    hidden, weight = torch.randn(20, 4), torch.randn(7, 4, requires_grad=True)
    with torch.no_grad(), _Largest() as seen:
        linear_cross_entropy(hidden, weight, torch.zeros(20, dtype=torch.int64), 5)
    assert seen.products == 4
