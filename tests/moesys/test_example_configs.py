"""The files in configs/ load, and are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesys
from moesys.config import RunConfig
from moesys.configuration import load_run_config

CONFIGS = sorted((Path(moesys.__path__[0]).parent / "configs").glob("*.toml"))


def test_there_are_some() -> None:
    assert {path.stem for path in CONFIGS} >= {"tiny-deepseek", "tiny-mixtral", "deepseek-v2-lite"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_loads_and_names_its_preset(path: Path) -> None:
    assert load_run_config(path, check_machine=False).preset == path.stem


def test_tiny_deepseek_is_what_train_does_by_itself() -> None:
    (path,) = [path for path in CONFIGS if path.stem == "tiny-deepseek"]
    assert load_run_config(path) == RunConfig()


def test_deepseek_v2_lite_sees_the_tokens_of_its_report() -> None:
    (path,) = [path for path in CONFIGS if path.stem == "deepseek-v2-lite"]
    training = load_run_config(path, check_machine=False).training
    assert training.steps * training.batch_size * training.sequence_length == pytest.approx(5.7e12, rel=0.01)
