"""Which values fit which fields, and how they are told."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from moesys.models.fields import Findings, coerce, describe, field_types, show
from moesys.models.presets import tiny_deepseek

PAIR, MANY, CHOICE = tuple[float, float], tuple[float, ...], Literal["a", "b"]


@pytest.mark.parametrize(
    ("value", "kind", "held"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (-0.5, float, -0.5),
        ("", str, ""),
        (False, bool, False),
        ("b", CHOICE, "b"),
        ([1, 0.5], PAIR, (1.0, 0.5)),
        ((), MANY, ()),
        ([1, 2, 3], MANY, (1.0, 2.0, 3.0)),
    ],
)
def test_values_that_fit(value: Any, kind: Any, held: Any) -> None:
    result = coerce(value, kind)
    assert result == held
    assert type(result) is type(held)
    if isinstance(result, tuple):
        assert all(type(item) is float for item in result)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3.0, int),
        ("3", int),
        (True, int),
        (True, float),
        ("1e-3", float),
        (10**400, float),
        (None, float),
        (1, str),
        ({}, str),
        (1, bool),
        ("true", bool),
        ("c", CHOICE),
        (["a"], CHOICE),
        ([0.9], PAIR),
        ([0.9, 0.9, 0.9], PAIR),
        ([0.9, "x"], PAIR),
        (0.9, MANY),
        ([True], MANY),
    ],
)
def test_values_that_do_not_fit(value: Any, kind: Any) -> None:
    with pytest.raises(TypeError, match="must be"):
        coerce(value, kind)


def test_kinds_in_words() -> None:
    words = [describe(kind) for kind in (int, float, str, bool, PAIR, MANY, CHOICE)]
    assert words == [
        "an integer",
        "a number",
        "text in quotes",
        "true or false",
        "2 numbers",
        "a list of numbers",
        'one of "a", "b"',
    ]


def test_values_as_toml_writes_them() -> None:
    assert [show(value) for value in (True, 'say "é"', 1e-8, [0.5, "x"])] == [
        "true",
        '"say \\"é\\""',
        "1e-08",
        '[0.5, "x"]',
    ]


def test_fields_keep_their_order() -> None:
    assert list(field_types(type(tiny_deepseek())))[:2] == ["vocab_size", "d_model"]


def test_findings_name_fields_values_rule_and_way_out() -> None:
    findings = Findings(tiny_deepseek(), prefix="model.")
    assert findings.require(True, "top_k", "never", "said")
    assert not findings.require(False, "top_k num_experts", "too many", "take fewer")
    assert findings.problems == ["model.top_k = 4, model.num_experts = 16: too many; take fewer"]
    assert findings.found[0][0] == ("model.top_k", "model.num_experts")


def test_every_bad_one_of_several_names_is_told() -> None:
    findings = Findings(tiny_deepseek())
    assert not findings.at_least(5, "num_heads num_layers top_k")
    assert [names for names, _ in findings.found] == [("num_heads",), ("top_k",)]
