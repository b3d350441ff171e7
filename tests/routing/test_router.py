from __future__ import annotations

import pytest
import torch

from moesys.routing.router import TopKRouter
from moesys.routing.token_choice import route


def make(dtype: torch.dtype = torch.float32) -> TopKRouter:
    router = TopKRouter(d_model=6, num_experts=4, top_k=2, score="sigmoid", normalize=True, scale=2.0).to(
        dtype
    )
    with torch.no_grad():
        router.weight.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
        router.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 0.0]))
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_scores_with_its_bias(dtype):
    router = make(dtype)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = router(x)
    want = route(x @ router.weight.t(), k=2, score="sigmoid", normalize=True, scale=2.0, bias=router.bias)
    assert torch.equal(got.experts, want.experts)
    assert (got.experts == 1).any(dim=1).all()
    torch.testing.assert_close(got.weights, want.weights)


def test_low_precision_input_meets_a_float32_weight():
    router = make()
    x = torch.randn(5, 6).to(torch.bfloat16)
    assert torch.equal(router(x).logits, router(x.float()).logits)
    assert router(x).logits.dtype == torch.float32


def test_bias_is_saved_and_has_no_gradient():
    router = make()
    assert set(router.state_dict()) == {"weight", "bias"}
    assert not router.bias.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_forward_changes_nothing():
    # B3: counts and biases are no state of the module
    router = make()
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router(torch.randn(5, 6))
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())
