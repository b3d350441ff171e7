"""The command line's words: grouped, matched to fields, and read by tyro."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesys.config import RunConfig
from moesys.overrides import (
    Faults,
    apply_options,
    known_fields,
    known_options,
    nearest,
    nearest_field,
    parse,
    read_options,
    split_arguments,
)


def value_at(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_words_go_to_the_options_that_take_them() -> None:
    words = "a.toml --training.steps 5 b --model.tie-embeddings c --optimizer.betas .8 .9 d --run_dir=x e --odd 1 f"
    groups, loose = split_arguments(words.split())
    assert groups == [
        ["--training.steps", "5"],
        ["--model.tie-embeddings"],
        ["--optimizer.betas", ".8", ".9"],
        ["--run_dir=x"],
        ["--odd", "1"],
    ]
    assert loose == ["a.toml", "b", "c", "d", "e", "f"]


def test_a_list_takes_all_words_up_to_the_next_option() -> None:
    groups, loose = split_arguments(["--optimizer.step-milestones", "-.1", ".2", ".3", "--preset", "x"])
    assert groups == [["--optimizer.step-milestones", "-.1", ".2", ".3"], ["--preset", "x"]]
    assert loose == []


def test_further_options_can_be_named() -> None:
    groups, loose = split_arguments(
        ["--resume", "run", "--print-config", "x"], {"--resume": 1, "--print-config": 0}
    )
    assert groups == [["--resume", "run"], ["--print-config"]]
    assert loose == ["x"]


def test_tyro_knows_every_option_and_no_other() -> None:
    for option, name in known_options().items():
        kind = known_fields()[name]
        if kind is bool:
            config = parse(RunConfig(), [option])
            assert config is not None
            assert value_at(config, name) is (".no-" not in option)
    assert parse(RunConfig(), ["--no-model.tie-embeddings"]) is None
    assert parse(RunConfig(), ["--model.foo", "3"]) is None


def words_for(kind: Any) -> st.SearchStrategy[tuple[list[str], Any]]:
    """Words for a value of this annotation, and the value that they mean."""
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind)).map(lambda text: ([text], text))
    if get_origin(kind) is tuple:
        size = None if Ellipsis in get_args(kind) else len(get_args(kind))
        lists = st.lists(numbers, min_size=size or 0, max_size=size or 4)
        return lists.map(lambda values: ([repr(value) for value in values], tuple(values)))
    if kind is int:
        return st.integers(-(10**9), 10**9).map(lambda number: ([str(number)], number))
    if kind is float:
        return numbers.map(lambda number: ([repr(number)], number))
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
    return text.filter(lambda word: not word.startswith("-")).map(lambda word: ([word], word))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_values_on_the_command_line_arrive_exactly(data: st.DataObject) -> None:
    kinds = {name: kind for name, kind in known_fields().items() if kind is not bool}
    names = data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=5, unique=True))
    meant, words = {}, []
    for name in names:
        values, meant[name] = data.draw(words_for(kinds[name]))
        words += [f"--{name.replace('_', '-')}", *values]
    faults = Faults()
    config = apply_options(RunConfig(), read_options(words, faults), faults)
    assert faults.problems == []
    assert {name: value_at(config, name) for name in names} == meant
    untouched = set(known_fields()) - set(names)
    assert all(value_at(config, name) == value_at(RunConfig(), name) for name in untouched)


def test_the_last_of_repeated_options_counts() -> None:
    config = parse(RunConfig(), ["--training.steps", "5", "--training.steps", "6"])
    assert config is not None
    assert config.training.steps == 6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--training.steps", "x"],
            "--training.steps x: must be an integer; write for instance --training.steps 880",
        ),
        (["--training.steps=1.5"], "--training.steps 1.5: must be an integer"),
        (["--training.steps"], "--training.steps: a value is missing, an integer"),
        (["--optimizer.lr", "fast"], "must be a number; write for instance --optimizer.lr 0.0025"),
        (["--optimizer.betas", "0.9"], "must be 2 numbers; write for instance --optimizer.betas 0.9 0.95"),
        (["--model.attention", "mha"], 'must be one of "mla", "gqa"; did you mean "mla"?'),
        (["--logging.wandb=true"], "takes no value; write --logging.wandb or --logging.no-wandb"),
        (["--data.cache", "-x"], "write --data.cache=-x"),
        (["--run-dir"], "--run-dir: a value is missing, text in quotes; write for instance --run-dir TEXT"),
    ],
)
def test_a_value_that_tyro_refuses_is_told(words: list[str], told: str) -> None:
    faults = Faults()
    before = RunConfig()
    after = apply_options(before, read_options(["--training.seed", "7", *words], faults), faults)
    assert len(faults.problems) == 1
    assert told in faults.problems[0]
    assert after.training.seed == 7  # the others still count
    assert len(faults.fields) == 1


def test_a_wrong_preset_spoils_the_whole_model() -> None:
    faults = Faults()
    faults.add("no such preset", "preset")
    assert {"preset", "model.top_k", "model.d_model"} <= faults.fields
    assert "training.steps" not in faults.fields


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--training.stepz", "--training.steps"),
        ("--trainig.steps", "--training.steps"),
        ("--steps", "--training.steps"),
        ("--lr", "--optimizer.lr"),
        ("--training.lr", "--optimizer.lr"),
        ("--model.tie_embedding", "--model.tie-embeddings"),
        ("--no-model.tie-embeddings", "--model.no-tie-embeddings"),
        ("--presets", "--preset"),
    ],
)
def test_the_option_meant_is_named(typed: str, meant: str) -> None:
    faults = Faults()
    assert read_options([typed, "1"], faults) == []
    assert faults.problems[0].startswith(f"{typed}: there is no such option; did you mean {meant}?")


def test_nothing_is_named_where_nothing_is_near() -> None:
    assert nearest("zork", ["steps", "seed"]) is None
    assert nearest_field("training.zork", known_fields()) is None


def test_words_without_an_option_are_told() -> None:
    faults = Faults()
    read_options(["true", "--model.qk-norm", "false"], faults)
    assert [problem.partition(":")[0] for problem in faults.problems] == ["true", "false"]
