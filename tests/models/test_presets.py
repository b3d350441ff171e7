"""Presets are valid and what their names promise."""

from __future__ import annotations

import pytest

from moesys.models.config import ModelConfig
from moesys.models.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_contradicts_itself(name: str) -> None:
    assert PRESETS[name]().problems() == []


def test_names_are_those_of_the_functions() -> None:
    assert {name: preset.__name__ for name, preset in PRESETS.items()} == {
        name: name.replace("-", "_") for name in PRESETS
    }
    assert len({preset() for preset in PRESETS.values()}) == len(PRESETS)


def test_the_default_is_tiny_deepseek() -> None:
    assert PRESETS["tiny-deepseek"]() == ModelConfig()


def test_tiny_switch_routes_as_switch_does() -> None:
    config = PRESETS["tiny-switch"]()
    assert (config.top_k, config.router, config.normalize_weights) == (1, "softmax", False)
    assert (config.activation, config.num_shared_experts, config.moe_layer_indices) == ("relu", 0, (1, 3))


def test_tiny_mixtral_routes_as_mixtral_does() -> None:
    config, large = PRESETS["tiny-mixtral"](), PRESETS["mixtral-8x7b"]()
    for field in ("attention", "num_experts", "top_k", "router", "normalize_weights", "num_shared_experts"):
        assert getattr(config, field) == getattr(large, field), field
    assert config.moe_layer_indices == tuple(range(config.num_layers))


def test_deepseek_dense_layers_come_first() -> None:
    first = {name: PRESETS[name]().moe_layer_indices[0] for name in PRESETS if name.startswith("deepseek")}
    assert first == {"deepseek-v2-lite": 1, "deepseek-v2": 1, "deepseek-v3": 3}


def test_deepseek_v2_scales_unnormalised_softmax_scores() -> None:
    config = PRESETS["deepseek-v2"]()
    assert (config.router, config.normalize_weights, config.route_scale) == ("softmax", False, 16.0)
    assert (config.num_groups, config.top_groups, config.group_score) == (8, 3, "max")


def test_switch_base_has_half_its_layers_sparse() -> None:
    config = PRESETS["switch-base-128"]()
    assert (config.d_model, config.d_ff, config.num_heads * config.head_dim) == (768, 3072, 768)
    assert len(config.moe_layer_indices) == config.num_layers / 2
