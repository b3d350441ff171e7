"""Every rule of a model's configuration: what breaks it is told, what keeps it builds and runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesys.models.config import ModelConfig
from moesys.models.transformer import Transformer
from moesys.models.validation import model_findings, model_problems

GQA = {"attention": "gqa"}
BROKEN: list[tuple[dict[str, Any], str, str]] = [  # changes, fields named, words of the rule
    *[({name: 0}, name, "at least 1") for name in ("vocab_size", "d_model", "num_layers", "num_heads")],
    *[({name: -1}, name, "at least 1") for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")],
    ({"norm_eps": 0.0}, "norm_eps", "above 0"),
    ({"init_std": -0.1}, "init_std", "above 0"),
    ({"init_std": float("nan")}, "init_std", "finite"),
    ({"rope_theta": float("inf")}, "rope_theta", "finite"),
    ({"rope_theta": 1.0}, "rope_theta", "above 1"),
    ({"mtp_depth": -1}, "mtp_depth", "negative"),
    ({"q_lora_rank": -1}, "q_lora_rank", "negative"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim", "pairs"),
    ({"qk_norm": True}, "attention qk_norm", "grouped-query"),
    ({"qkv_bias": True}, "attention qkv_bias", "grouped-query"),
    ({**GQA, "num_kv_heads": 3}, "num_heads num_kv_heads", "divide"),
    ({**GQA, "num_kv_heads": 0}, "num_kv_heads", "at least 1"),
    ({**GQA, "head_dim": 7}, "head_dim", "pairs"),
    ({**GQA, "qk_norm": True, "qk_norm_whole": True}, "qk_norm qk_norm_whole", "not both"),
    ({"yarn_factor": 0.5}, "yarn_factor", "at least 1"),
    ({"yarn_original_length": 0}, "yarn_original_length", "at least 1"),
    ({"yarn_beta_fast": 1.0}, "yarn_beta_fast yarn_beta_slow", "above beta_slow"),
    ({"yarn_beta_slow": 0.0}, "yarn_beta_slow", "above 0"),
    ({"yarn_mscale": -1.0}, "yarn_mscale", "negative"),
    ({"moe_layers": "9"}, "moe_layers num_layers", "'9' names none"),
    ({"moe_layers": "1:,x"}, "moe_layers num_layers", "'x' names none"),
    ({"moe_layers": "6:"}, "moe_layers num_layers", "'6:' names none"),
    ({"moe_layers": "1:2:0"}, "moe_layers num_layers", "names none"),
    ({"d_ff": 0}, "d_ff", "at least 1"),
    ({"num_experts": 0}, "moe_layers num_experts", "at least one expert"),
    ({"d_expert": 0}, "d_expert", "at least 1"),
    ({"top_k": 0}, "top_k", "at least 1"),
    ({"top_k": 17}, "top_k num_experts", "only 16 experts"),
    ({"num_shared_experts": -1}, "num_shared_experts", "negative"),
    ({"shared_gate": True, "num_shared_experts": 0}, "shared_gate num_shared_experts", "no shared expert"),
    ({"num_groups": 0}, "num_groups", "at least 1"),
    ({"num_groups": 3}, "num_experts num_groups", "evenly"),
    ({"num_groups": 4, "top_groups": 5}, "top_groups num_groups", "more groups than"),
    ({"num_groups": 8, "top_groups": 1}, "top_k num_experts num_groups top_groups", "only 2 experts"),
    ({"num_groups": 16, "top_groups": 4}, "group_score num_experts num_groups", "two best"),
    ({"route_scale": 0.0}, "route_scale", "above 0"),
    ({"top_k": 1, "router": "softmax"}, "top_k normalize_weights", "no gradient"),
    ({"top_k": 1}, "top_k normalize_weights", "no gradient"),
    ({"attention": "linear"}, "attention", 'one of "mla", "gqa"'),
    ({"activation": "silu"}, "activation", "one of"),
    ({"d_model": 256.0}, "d_model", "an integer"),
    ({"tie_embeddings": 1}, "tie_embeddings", "true or false"),
]


@pytest.mark.parametrize(("changes", "fields", "rule"), BROKEN)
def test_a_broken_rule_is_told(changes: dict[str, Any], fields: str, rule: str) -> None:
    findings = model_findings(replace(ModelConfig(), **changes))
    assert [names for names, _ in findings.found] == [tuple(fields.split())]
    text = findings.problems[0]
    assert rule in text
    for name in fields.split():
        assert f"{name} = " in text  # the value
    assert text.rpartition("; ")[2]  # the way out


@pytest.mark.parametrize(
    "changes",
    [
        {
            "moe_layers": "",
            "num_experts": 0,
            "top_k": 0,
            "d_expert": 0,
            "num_groups": 0,
        },  # a dense model has none
        {"moe_layers": "0:", "d_ff": 0},  # no dense layer, so no width for one
        {"moe_layers": " 0 , -1"},
        {"top_k": 16},
        {"top_k": 1, "normalize_weights": False},
        {"top_k": 1, "num_experts": 1},  # nothing to learn about one expert
        {"num_groups": 4, "top_groups": 1},
        {"num_groups": 16, "top_groups": 4, "group_score": "max"},
        {"num_kv_heads": 3, "head_dim": 7},  # MLA has neither
        {**GQA, "qk_rope_head_dim": 7, "kv_lora_rank": 0},  # and the other way round
    ],
)
def test_what_keeps_the_rules_is_accepted(changes: dict[str, Any]) -> None:
    assert model_problems(replace(ModelConfig(), **changes)) == []


def test_all_broken_rules_are_told_at_once() -> None:
    problems = ModelConfig(top_k=99, d_model=0, init_std=0.0, moe_layers="1:,77", yarn_factor=0.1).problems()
    assert len(problems) == 5


def test_numbers_of_the_wrong_kind_come_before_rules_about_them() -> None:
    problems = model_problems(replace(ModelConfig(), top_k="4", num_experts=None, d_model=0))  # type: ignore[arg-type]
    assert len(problems) == 2
    assert 'top_k = "4": must be an integer' in problems[1]


SMALL = ModelConfig(
    vocab_size=13,
    d_model=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    kv_lora_rank=4,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    d_ff=8,
    num_experts=6,
    d_expert=4,
    top_k=2,
)
VARIATIONS: dict[str, list[Any]] = {
    "d_model": [0, 4],
    "num_layers": [1, 3],
    "attention": ["gqa"],
    "num_heads": [1, 3],
    "num_kv_heads": [2],
    "head_dim": [3, 2],
    "qk_norm": [True],
    "qk_norm_whole": [True],
    "q_lora_rank": [3],
    "kv_lora_rank": [0],
    "qk_rope_head_dim": [3, 4],
    "yarn_factor": [4.0],
    "activation": ["relu", "geglu"],
    "moe_layers": ["", "0:", "1", "0,2"],
    "num_experts": [0, 1, 4],
    "num_shared_experts": [0, 2],
    "shared_gate": [True],
    "top_k": [1, 3, 4],
    "router": ["softmax"],
    "normalize_weights": [False],
    "num_groups": [2, 3],
    "top_groups": [2],
    "group_score": ["max"],
    "mtp_depth": [1],
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_a_model_without_problems_builds_and_runs(data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(VARIATIONS)), max_size=6))
    config = replace(SMALL, **{name: data.draw(st.sampled_from(VARIATIONS[name])) for name in sorted(names)})
    assume(config.problems() == [])
    torch.manual_seed(0)
    model = Transformer(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    tokens = torch.tensor([[1, 5, 3, 2, 12]])
    positions, documents = torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.int64)
    sums = model(tokens, tokens, positions, documents)
    assert torch.isfinite(sums.ce) and sums.ce > 0
