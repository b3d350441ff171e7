"""Parameter counts against the published figures and against the modules themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesys.models.config import ModelConfig
from moesys.models.count import count_parameters
from moesys.models.presets import PRESETS, tiny_deepseek, tiny_dense
from moesys.models.transformer import Transformer

PUBLISHED = {  # total and active in billions, as the model's authors print them
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "olmoe-1b-7b": (6.9, 1.3),
}


def numel_on_meta(config: ModelConfig) -> tuple[int, int]:
    """Total and active parameters, from the tensors of the built module."""
    with torch.device("meta"):
        sizes = {name: weight.numel() for name, weight in Transformer(config).named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    total = sum(sizes.values())
    return total, total - experts + (experts * config.top_k // config.num_experts if experts else 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    total, active = PUBLISHED[name]
    count = count_parameters(PRESETS[name]())
    assert count.total / 1e9 == pytest.approx(total, abs=0.5 if total > 100 else 0.05)
    look_up = count.by_part["embedding"] if name.startswith("deepseek") else 0  # DeepSeek does not count it
    assert (count.active - look_up) / 1e9 == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_match_their_modules(name: str) -> None:
    config = PRESETS[name]()
    count = count_parameters(config)
    assert (count.total, count.active) == numel_on_meta(config)
    assert sum(count.by_part.values()) == count.total


def test_deepseek_v3_with_its_prediction_module() -> None:
    config = replace(PRESETS["deepseek-v3"](), mtp_depth=1)
    count = count_parameters(config)
    assert (count.total, count.active) == numel_on_meta(config)
    # the release states 685 B with a second copy of embedding and head, which the module here shares
    assert (count.total + 2 * count.by_part["embedding"]) / 1e9 == pytest.approx(684.5, abs=0.5)


def test_tiny_dense_has_the_active_parameters_of_tiny_deepseek() -> None:
    dense, moe = count_parameters(tiny_dense()), count_parameters(tiny_deepseek())
    assert dense.total == dense.active == pytest.approx(moe.active, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_model_matches_its_module(data: st.DataObject) -> None:
    def pick(*choices: object) -> object:
        return data.draw(st.sampled_from(choices))

    config = ModelConfig(
        **dict(  # type: ignore[arg-type]
            vocab_size=11,
            d_model=pick(6, 8),
            num_layers=3,
            tie_embeddings=pick(True, False),
            attention=pick("mla", "gqa"),
            num_heads=4,
            num_kv_heads=pick(1, 2, 4),
            head_dim=pick(2, 6),
            qk_norm=pick(True, False),
            qkv_bias=pick(True, False),
            q_lora_rank=pick(0, 5),
            kv_lora_rank=7,
            qk_nope_head_dim=3,
            qk_rope_head_dim=2,
            v_head_dim=5,
            activation=pick("swiglu", "geglu", "gelu", "relu"),
            d_ff=9,
            moe_layers=pick("", "1:", "0,2", "0:", "1"),
            num_experts=pick(4, 5),
            num_shared_experts=pick(0, 1, 2),
            d_expert=3,
            top_k=pick(1, 3),
            mtp_depth=pick(0, 2),
        )
    )
    config = replace(
        config,
        shared_gate=config.num_shared_experts > 0 and bool(pick(True, False)),
        qk_norm_whole=not config.qk_norm and bool(pick(True, False)),
    )
    count = count_parameters(config)
    assert (count.total, count.active) == numel_on_meta(config)
