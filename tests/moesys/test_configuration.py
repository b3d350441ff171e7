"""Preset, file and command line become one configuration, or one error that tells everything."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesys.config import OptimizerConfig, RunConfig, TrainingConfig
from moesys.configuration import ConfigError, load_run_config, load_saved, to_toml
from moesys.models.fields import field_types
from moesys.models.presets import PRESETS
from moesys.overrides import Faults, known_fields


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path | None, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, arguments)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_nothing_gives_the_defaults() -> None:
    assert load_run_config(None) == RunConfig()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_alone_gives_its_model(preset: str) -> None:
    config = load_run_config(None, ["--preset", preset])
    assert config == RunConfig(preset=preset, model=PRESETS[preset]())


def test_the_command_line_goes_before_the_file_and_that_before_the_preset(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'preset = "tiny-mixtral"\n[model]\ntop_k = 3\nnum_experts = 4\n[training]\nsteps = 300\n'
    )
    config = load_run_config(path, ["--model.num-experts", "6", "--training.seed=2"])
    model = replace(PRESETS["tiny-mixtral"](), top_k=3, num_experts=6)
    assert config == RunConfig(preset="tiny-mixtral", model=model, training=TrainingConfig(steps=300, seed=2))


def test_a_preset_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "tiny-mixtral"\n[model]\nnum_layers = 3\n')
    config = load_run_config(path, ["--preset", "tiny-switch"])
    assert config.model == replace(PRESETS["tiny-switch"](), num_layers=3)
    assert config.preset == "tiny-switch"
    assert load_run_config(path, ["--preset=tiny-switch"]) == config


def test_integers_and_lists_fit_numbers_and_tuples(tmp_path: Path) -> None:
    path = write(tmp_path, "[optimizer]\nlr = 1\nbetas = [0, 0.5]\nstep_milestones = []\n")
    optimizer = load_run_config(path).optimizer
    assert optimizer == OptimizerConfig(lr=1.0, betas=(0.0, 0.5), step_milestones=())
    assert type(optimizer.lr) is float


EVERYTHING_WRONG = """
preset = "tiny-deepsek"
steps = 5
[trainig]
seed = 3
[training]
stepz = 3
batch_size = "16"
micro_batch_size = 5
precision = "float16"
[optimizer]
lr = -1
betas = [0.9]
[checkpoint]
keep = 0
"""


def test_one_error_tells_every_problem(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING_WRONG)
    problems = problems_of(
        path, "--training.steps", "x", "--optimizer.epz", "1", "--data.held-out", "2", "stray"
    )
    expected = [
        "stray: this belongs to no option",
        "--optimizer.epz: there is no such option; did you mean --optimizer.eps?",
        'preset = "tiny-deepsek": there is no such preset; did you mean "tiny-deepseek"?',
        f"[trainig] ({path}): there is no such table; did you mean [training]?",
        f"steps ({path}): there is no such field; did you mean training.steps?",
        f"training.stepz ({path}): there is no such field; did you mean training.steps?",
        f'training.batch_size = "16" ({path}): must be an integer; write for instance batch_size = 4',
        f'training.precision = "float16" ({path}): must be one of "float32", "bfloat16", "float64"; did you mean',
        f"optimizer.betas = [0.9] ({path}): must be 2 numbers; write for instance betas = [0.9, 0.95]",
        "--training.steps x: must be an integer; write for instance --training.steps 880",
        "data.held_out = 2.0: without data.validation a share",
        "optimizer.lr = -1.0: must be above 0",
        "checkpoint.keep = 0: must be at least 1",
    ]
    assert len(problems) == len(expected)
    for problem, beginning in zip(problems, expected, strict=True):
        assert problem.startswith(beginning)


def test_no_rule_is_judged_on_a_value_that_was_not_read(tmp_path: Path) -> None:
    # with the default 16 in place of "x", 5 would not divide it; with the default preset, top_k 20 would not fit
    path = write(tmp_path, '[training]\nbatch_size = "x"\nmicro_batch_size = 5\n')
    assert len(problems_of(path)) == 1
    assert len(problems_of(None, "--preset", "nope", "--model.top-k", "20")) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = = 1", "this is not TOML"),
        ("[model]\nd_model = 1\nd_model = 2", "this is not TOML"),
        ("model = 3", "model = 3 ("),
        ("model = 3", "write [model] and its fields below"),
        ("[training.steps]\nx = 1", "training.steps = a table"),
        ("[preset]\nx = 1", "[preset] ("),
        ("preset = 3", "preset = 3 ("),
        ("[[training]]\nsteps = 1", "this is a table"),
        ("[checkpoint]\nzork = 1", "there are interval, keep, asynchronous"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: must be finite"),
        ("[training]\nsteps = 2024-01-01", "must be an integer"),
    ],
)
def test_what_a_file_can_get_wrong(tmp_path: Path, text: str, told: str) -> None:
    problems = problems_of(write(tmp_path, text))
    assert len(problems) == 1
    assert told in problems[0]


def test_files_that_cannot_be_read_are_told_with_the_command_lines_faults(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, told in [(tmp_path / "none.toml", "no such file"), (tmp_path, "folder"), (binary, "not TOML")]:
        problems = problems_of(path, "--lr", "1", "--training.steps", "0")
        assert len(problems) == 2  # the 0 is not judged: the file might have made it right
        assert problems[0].startswith(f"{path}: ")
        assert told in problems[0]


def test_a_preset_that_cannot_have_an_effect_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, to_toml(RunConfig()))
    assert load_run_config(path, ["--preset", "tiny-deepseek"]) == RunConfig()
    assert "another preset has no effect" in problems_of(path, "--preset", "tiny-mixtral")[0]


def test_help_shows_every_option_with_its_value_and_docstring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, "[training]\nsteps = 1234\n")
    with pytest.raises(SystemExit) as caught:
        load_run_config(
            path, ["--preset", "tiny-mixtral", "--help"], prog="moesys train", description="Say this."
        )
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "usage: moesys train" in text and "Say this." in text
    for name in known_fields():
        assert f"--{name.replace('_', '-')}" in text
    assert "Optimiser steps. (default: 1234)" in text
    assert "Routed experts per MoE layer. (default: 8)" in text
    assert "training options" in text and "model options" in text


def test_the_machine_is_asked_only_if_wanted(tmp_path: Path) -> None:
    arguments = ["--data.source", str(tmp_path / "nothing")]
    assert load_run_config(None, arguments, check_machine=False).data.source == arguments[1]
    assert "no such file or folder" in problems_of(None, *arguments)[0]


def values(kind: Any) -> st.SearchStrategy[Any]:
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    if is_dataclass(kind):
        return st.builds(kind, **{name: values(inner) for name, inner in field_types(kind).items()})  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        if Ellipsis in get_args(kind):
            return st.lists(numbers, max_size=4).map(tuple)
        return st.tuples(*[numbers for _ in get_args(kind)])
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    return {int: st.integers(-(2**63), 2**63 - 1), float: numbers, str: text, bool: st.booleans()}[kind]


@settings(max_examples=100, deadline=None)
@given(config=values(RunConfig))
def test_any_values_survive_toml_exactly(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    # values that break rules too: what is written and read is looked at here, not whether it could run
    from moesys.configuration import _apply_table, _read_toml

    path = write(tmp_path_factory.getbasetemp(), to_toml(config))
    faults = Faults()
    again = _apply_table(RunConfig(), _read_toml(path, faults), path, faults)
    assert faults.problems == []
    assert again == config
    assert repr(again) == repr(config)  # 0.0 and -0.0, 1 and 1.0 are equal but not the same


@settings(max_examples=30, deadline=None)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    lr=st.floats(min_value=1e-12, max_value=10, exclude_min=True),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    milestones=st.lists(st.floats(0.001, 0.999), max_size=4, unique=True).map(
        lambda marks: tuple(sorted(marks))
    ),
    sizes=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    run_dir=st.text(st.characters(codec="utf-8"), max_size=12),
)
def test_what_print_config_prints_loads_as_the_same_run(
    preset: str,
    lr: float,
    betas: tuple[float, float],
    milestones: tuple[float, ...],
    sizes: tuple[int, int],
    run_dir: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = RunConfig(
        preset=preset,
        run_dir=run_dir,
        model=PRESETS[preset](),
        optimizer=OptimizerConfig(lr=lr, betas=betas, schedule="step", step_milestones=milestones),
        training=TrainingConfig(batch_size=sizes[0] * sizes[1], micro_batch_size=sizes[1]),
    )
    assert load_run_config(write(tmp_path_factory.getbasetemp(), to_toml(config))) == config


def test_toml_names_every_field() -> None:
    import tomllib

    table = tomllib.loads(to_toml(RunConfig()))
    for field in fields(RunConfig):
        part = getattr(RunConfig(), field.name)
        names = [inner.name for inner in fields(part)] if is_dataclass(part) else None
        assert names is None or list(table[field.name]) == names


class TestSavedRuns:
    """A run folder's config.toml, and what may change on going on."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        config = RunConfig(run_dir="runs/a", training=TrainingConfig(steps=500))
        (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        return tmp_path

    def test_folder_and_file_both_name_it(self, run: Path) -> None:
        assert load_saved(run) == load_saved(run / "config.toml")
        assert load_saved(run).training.steps == 500

    def test_options_go_on_top(self, run: Path) -> None:
        config = load_saved(run, ["--training.steps", "900", "--optimizer.lr", "0.001"])
        assert config == replace(
            load_saved(run),
            training=TrainingConfig(steps=900),
            optimizer=OptimizerConfig(lr=0.001),
        )

    def test_what_checkpoints_depend_on_stays(self, run: Path) -> None:
        arguments = (
            "--model.d-model 512 --preset tiny-mixtral --run-dir b --data.tokenizer bytes --training.steps 0"
        )
        with pytest.raises(ConfigError) as caught:
            load_saved(run, arguments.split())
        heads = [problem.partition(":")[0] for problem in caught.value.problems]
        assert heads == [
            'preset = "tiny-mixtral"',
            'run_dir = "b"',
            "model.d_model = 512",
            'data.tokenizer = "bytes"',
            "training.steps = 0",
        ]
        assert "here 256" in caught.value.problems[2]

    def test_the_same_value_again_is_no_change(self, run: Path) -> None:
        assert load_saved(run, ["--model.d-model", "256"]) == load_saved(run)

    def test_a_folder_without_a_run_is_told_with_the_rest(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            load_saved(tmp_path / "none", ["--lr", "1", "--model.d-model", "512"])
        assert len(caught.value.problems) == 2
        assert "there is no such run" in caught.value.problems[0]

    def test_a_run_made_on_another_machine_can_be_read(self, tmp_path: Path) -> None:
        config = RunConfig(training=TrainingConfig(device="cuda", precision="bfloat16"))
        (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        assert load_saved(tmp_path) == config


def test_the_text_of_an_error_lists_the_problems() -> None:
    assert str(ConfigError(["a: b; c"])) == "The configuration has a problem:\n  - a: b; c"
    assert str(ConfigError(["x", "y"])) == "The configuration has 2 problems:\n  - x\n  - y"
    assert isinstance(ConfigError(["x"]), ValueError)
