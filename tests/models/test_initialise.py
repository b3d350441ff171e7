from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moesys.models.initialise import build, initialise
from moesys.models.transformer import Transformer
from moesys.testing.tiny import tiny

CONFIG = tiny(d_model=64, d_expert=64, d_ff=96, kv_lora_rank=48, vocab_size=300, init_std=0.05, mtp_depth=1)


def values(**changes) -> dict[str, torch.Tensor]:
    arguments = {"config": CONFIG, "seed": 3, "dtype": torch.float32, "device": "cpu"} | changes
    return build(**arguments).state_dict()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_pure_function_of_the_seed():
    first = values()
    torch.manual_seed(123)
    torch.rand(7)
    assert same(values(), first)
    other = values(seed=4)
    assert not any(torch.equal(first[n], other[n]) for n in first if "norm" not in n and "bias" not in n)


def test_drawing_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values()
    assert torch.equal(torch.get_rng_state(), before)


def test_same_values_in_every_dtype():
    low, full = values(), values(dtype=torch.float64)
    assert same(low, {name: value.float() for name, value in full.items()})
    assert same({n: v.double() for n, v in low.items()}, full)


def test_every_weight_has_its_own_values():
    drawn = {n: v for n, v in values().items() if "norm" not in n and "bias" not in n}
    starts = {tuple(v.flatten()[:4].tolist()) for v in drawn.values()}
    assert len(starts) == len(drawn)


def test_a_name_keeps_its_values_in_another_model():
    first = values()
    for changes in ({"num_layers": 2, "mtp_depth": 0}, {"num_experts": 2}, {"tie_embeddings": False}):
        other = values(config=replace(CONFIG, **changes))
        for name in other.keys() & first.keys():  # of two stacks of experts, those that both have
            assert torch.equal(first[name][: len(other[name])], other[name]), name


def test_experts_differ_and_each_has_the_spread_of_a_dense_layer():
    # P17: the spread must not depend on how many experts are stacked
    state = values(config=replace(CONFIG, num_experts=8))
    deep = 1 / math.sqrt(2 * CONFIG.num_layers)
    for name, want in (("w13", 0.05), ("w2", 0.05 * deep)):
        experts = state[f"blocks.1.feed_forward.experts.{name}"]
        dense = state[f"blocks.0.feed_forward.{name}.weight"]
        assert dense.std().item() == pytest.approx(want, rel=0.03)
        assert len({expert[0, 0].item() for expert in experts}) == 8
        for expert in experts:
            assert expert.std().item() == pytest.approx(want, rel=0.05)
            assert abs(expert.mean().item()) < 0.05 * want


def test_spread_of_the_rest():
    state = values(config=replace(CONFIG, tie_embeddings=False, num_experts=16))
    deep = 1 / math.sqrt(2 * CONFIG.num_layers)
    wanted = {
        "embedding": 1.0,
        "head": 1.0,
        "blocks.0.attention.kv_down.weight": 1.0,
        "blocks.0.attention.out.weight": deep,
        "blocks.1.feed_forward.router.weight": 1.0,
        "blocks.1.feed_forward.shared.w2.weight": deep,
        "mtp.0.mix.weight": 1.0,
    }
    for name, factor in wanted.items():
        assert state[name].std().item() == pytest.approx(0.05 * factor, rel=0.1), name


def test_norms_and_biases():
    state = values(config=tiny(attention="gqa", qkv_bias=True, qk_norm=True, mtp_depth=1))
    for name, value in state.items():
        if "norm" in name:
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert value.std() > 0, name


def test_nothing_is_left_unset():
    with torch.device("meta"):
        model = Transformer(tiny(mtp_depth=1, shared_gate=True, q_lora_rank=3, tie_embeddings=False))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.fill_(float("nan"))
    initialise(model, 0)
    for name, value in model.state_dict().items():
        assert torch.isfinite(value).all(), name
