from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.models.config import ModelConfig
from moesys.models.moe import MoE
from moesys.testing import oracles
from moesys.testing.tiny import randomise, tiny, weights_of

GROUPED = {"num_experts": 6, "num_groups": 3, "top_groups": 2}
VARIANTS = {
    "sigmoid, shared": {},
    "softmax, renormalised": {"router": "softmax"},
    "softmax, not renormalised": {"router": "softmax", "normalize_weights": False},
    "sigmoid, not renormalised": {"normalize_weights": False},
    "scaled": {"route_scale": 2.5},
    "no shared expert": {"num_shared_experts": 0},
    "two gated shared experts": {"num_shared_experts": 2, "shared_gate": True},
    "groups by the best": {**GROUPED, "group_score": "max", "router": "softmax"},
    "groups by the two best": {**GROUPED, "group_score": "top2"},
    "every expert": {"top_k": 4},
    "one choice": {"top_k": 1, "router": "softmax", "normalize_weights": False},
    "one expert": {"num_experts": 1, "top_k": 1},
    "geglu": {"activation": "geglu"},
    "gelu": {"activation": "gelu", "num_shared_experts": 2, "shared_gate": True},
    "relu": {"activation": "relu"},
}


def make(config: ModelConfig, dtype: torch.dtype = torch.float64) -> MoE:
    layer = MoE(config).to(dtype)
    randomise(layer)
    return layer


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_against_the_loop_over_tokens_and_experts(changes, padded):
    config = tiny(**changes)
    layer = make(config)
    weights = weights_of(layer)
    x = draw(2, 5, 8).requires_grad_()
    y = x.detach().clone().requires_grad_()
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool) if padded else None

    out, report = layer(x, real)
    outputs, routed = [], [[], []]
    for index, token in enumerate(y.flatten(0, 1)):
        value, routing = oracles.moe_token(token, weights, config)
        if real is None or real.flatten()[index]:
            routed[index // 5].append(routing)
        else:
            value = oracles.shared_experts(token, weights, config)
        outputs.append(value)
    want = torch.stack(outputs).view(2, 5, 8)

    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
    everything = [*routed[0], *routed[1]]
    counts = oracles.load_counts(everything, config.num_experts)
    assert report.chosen.tolist() == report.computed.tolist() == counts
    balance = sum(oracles.load_balance(row, config) for row in routed)
    probabilities = torch.stack([token.probabilities for token in everything]).sum(0)
    z = oracles.z_loss_sum(everything)
    torch.testing.assert_close(report.load_balance_sum, balance, atol=1e-12, rtol=0)
    torch.testing.assert_close(report.probability_sum, probabilities, atol=1e-12, rtol=0)
    torch.testing.assert_close(report.z_sum, z, atol=1e-12, rtol=0)

    pull, push = draw(2, 5, 8, seed=1), draw(config.num_experts, seed=2)
    sums = (report.load_balance_sum, (report.probability_sum * push).sum(), report.z_sum)
    others = (balance, (probabilities * push).sum(), z)
    ours = (out * pull).sum() + 0.3 * sums[0] + 0.5 * sums[1] + 0.7 * sums[2]
    right = (want * pull).sum() + 0.3 * others[0] + 0.5 * others[1] + 0.7 * others[2]
    ours.backward(), right.backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-11, rtol=0)
    names = dict(layer.named_parameters())
    assert {n for n in weights if n != "router.bias"} == set(names)
    for name, parameter in names.items():
        want_grad = weights[name].grad
        want_grad = torch.zeros_like(parameter) if want_grad is None else want_grad
        torch.testing.assert_close(
            parameter.grad, want_grad, atol=1e-11, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert name.startswith("experts") or want_grad.abs().max() > 0, name


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_tokens(shape):
    # P10: gradients are zero, not None
    layer = make(tiny(num_shared_experts=1, shared_gate=True))
    x = torch.zeros(*shape, 8, dtype=torch.float64, requires_grad=True)
    out, report = layer(x)
    (out.sum() + report.load_balance_sum + report.z_sum).backward()
    assert out.shape == x.shape
    assert report.chosen.tolist() == [0] * 4
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_a_batch_of_padding_only():
    layer = make(tiny(num_shared_experts=0))
    x = draw(2, 3, 8).requires_grad_()
    out, report = layer(x, torch.zeros(2, 3, dtype=torch.bool))
    (out.sum() + report.load_balance_sum + report.z_sum + report.probability_sum.sum()).backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert report.computed.tolist() == [0] * 4
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_padding_changes_nothing_for_the_others():
    layer = make(tiny())
    real = torch.tensor([[True, True, False, False]])
    first, second = draw(1, 4, 8), draw(1, 4, 8)
    second[:, 2:] = 1e3 * draw(1, 2, 8, seed=5)
    (a, one), (b, two) = layer(first, real), layer(second, real)
    assert torch.equal(a[:, :2], b[:, :2])
    assert torch.equal(one.load_balance_sum, two.load_balance_sum)
    assert torch.equal(one.probability_sum, two.probability_sum)
    assert torch.equal(one.z_sum, two.z_sum)
    assert torch.equal(one.computed, two.computed)


def test_one_expert_gets_everything():
    layer = make(tiny(top_k=1, normalize_weights=False, num_shared_experts=0))
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([0.0, 0.0, 50.0, 0.0]))
    x = draw(2, 5, 8).requires_grad_()
    out, report = layer(x)
    out.sum().backward()
    assert report.computed.tolist() == [0, 0, 10, 0]
    for parameter in (layer.experts.w13, layer.experts.w2):
        assert (parameter.grad[[0, 1, 3]] == 0).all()
        assert (parameter.grad[2] != 0).any()


def test_renaming_the_experts_changes_nothing():
    layer, other = make(tiny(num_experts=6)), make(tiny(num_experts=6))
    order = [4, 2, 0, 5, 1, 3]
    with torch.no_grad():
        for tensor in (other.router.weight, other.router.bias, other.experts.w13, other.experts.w2):
            tensor.copy_(tensor[order])
    x = draw(2, 5, 8)
    (a, one), (b, two) = layer(x), other(x)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert torch.equal(one.chosen[order], two.chosen)
    torch.testing.assert_close(one.load_balance_sum, two.load_balance_sum)


def test_the_order_of_the_tokens_does_not_matter():
    layer = make(tiny())
    x = draw(1, 9, 8)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x[:, order])[0], layer(x)[0][:, order], atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_close(dtype):
    # the router keeps float32, so the same experts are chosen from the same input
    config = tiny(d_model=16, d_expert=8, num_experts=8)
    exact = make(config)
    layer = make(config, torch.float32)
    if dtype == torch.bfloat16:
        layer.experts.to(dtype), layer.shared.to(dtype)
    x = draw(2, 16, 16).to(dtype)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    out, report = layer(x)
    want, right = exact(x.double())
    assert out.dtype == dtype
    assert torch.equal(report.chosen, right.chosen)
    assert report.load_balance_sum.dtype == torch.float32
    error = (out.double() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1.5e-2)


def test_a_hundred_forwards_hold_no_memory():
    # A13: nothing is collected outside of the returned report
    layer = make(tiny())
    x = draw(1, 4, 8)
    with torch.no_grad():
        first = layer(x)[1]
        for _ in range(100):
            last = layer(x)[1]
    assert torch.equal(first.chosen, last.chosen)
    assert torch.equal(first.load_balance_sum, last.load_balance_sum)
    tensors = [v for v in vars(layer).values() if isinstance(v, Tensor | list)]
    assert tensors == []
