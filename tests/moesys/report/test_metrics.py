"""Reading metrics.jsonl: what is kept, what is forgiven, and what is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesys.report.metrics import read_metrics

LOAD = {"max_violation": 0.5, "entropy": 0.6, "dropped_share": 0.0, "dead": 1}


def row(step: int, /, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 10 * step, "loss": 2.0, "experts": {}} | more


def write(folder: Path, *lines: object, end: str = "\n") -> Path:
    path = folder / "metrics.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + end)
    return path


def test_values_arrive_in_order_and_null_becomes_nan(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, row(1), row(2, loss=None), row(4, eval_loss=1.5)))
    assert metrics.steps.tolist() == [1, 2, 4]
    assert metrics.column("tokens").tolist() == [10, 20, 40]
    np.testing.assert_array_equal(metrics.column("loss"), [2.0, math.nan, 2.0])
    np.testing.assert_array_equal(metrics.column("eval_loss"), [math.nan, math.nan, 1.5])
    assert not metrics.truncated and metrics.layers == {}
    assert not metrics.has("grad_norm") and np.isnan(metrics.column("grad_norm")).all()


def test_layers_are_sorted_by_number_and_may_be_absent_from_a_step(tmp_path: Path) -> None:
    two, ten = LOAD | {"share": [0.25, 0.75]}, LOAD | {"share": [1.0, None, 0.0]}
    metrics = read_metrics(write(tmp_path, row(1, experts={"10": ten, "2": two}), row(2, experts={"2": two})))
    assert list(metrics.layers) == [2, 10]
    np.testing.assert_allclose(metrics.layers[2].relative_load, [[0.5, 1.5]] * 2)
    np.testing.assert_array_equal(metrics.layers[10].share, [[1, math.nan, 0], [math.nan] * 3])
    np.testing.assert_array_equal(metrics.layers[10].dead, [1, math.nan])
    np.testing.assert_allclose(metrics.layers[2].relative_entropy, 0.6 / math.log(2))


def test_one_expert_has_full_relative_entropy(tmp_path: Path) -> None:
    one = LOAD | {"share": [1.0], "entropy": 0.0}
    assert read_metrics(write(tmp_path, row(1, experts={"0": one}))).layers[0].relative_entropy == [1.0]


def test_auxiliary_losses_are_found_by_name(tmp_path: Path) -> None:
    line = row(1, ce_loss=1.9, load_balance_loss=1.0, z_loss=None, mtp_loss=3.0, eval_loss=2.0)
    assert read_metrics(write(tmp_path, line)).auxiliary == ["load_balance_loss", "mtp_loss"]


@given(cut=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_gives_every_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    lines = [row(step, experts={"1": LOAD | {"share": [0.5, 0.5]}}, note=step / 7) for step in range(1, 6)]
    whole = write(tmp_path_factory.mktemp("cut"), *lines).read_bytes()
    cut %= len(whole) + 1
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_bytes(whole[:cut])
    ends = [match.start() for match in re.finditer(b"\n", whole)]  # a line is whole without its line end
    expected = sum(end <= cut for end in ends)
    if expected == 0:
        with pytest.raises(ValueError, match="no whole line"):
            read_metrics(path)
        return
    metrics = read_metrics(path)
    assert metrics.steps.tolist() == list(range(1, expected + 1))
    assert metrics.truncated == (cut not in ends and cut - 1 not in ends)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 2, "tok', "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "is a list, expected an object"),
        ('{"step": 2, "tokens": 20}', "lacks 'loss'"),
        ('{"step": 2, "tokens": 20, "loss": NaN}', "holds NaN, which is not JSON"),
        (row(1), "step 1 follows step 1"),
        (row(2, step=2.5), "step is 2.5, expected a whole number"),
        (row(2, step=True), "step is true"),
        (row(2, lr="high"), 'lr is "high", expected a number or null'),
        (row(2, experts=[]), "experts is an empty list, expected an object of layers"),
        (row(2, experts={"a": {}}), "experts.a: a layer is named by its index"),
        (row(2, experts={"1": {"share": []}}), "experts.1.share is an empty list, expected a list"),
        (row(2, experts={"1": {"share": ["x"]}}), "experts.1.share is a list, expected a list with a number"),
        (row(2, experts={"1": LOAD | {"share": [1], "dead": "no"}}), 'experts.1.dead is "no"'),
        (row(2, experts={"1": LOAD | {"share": [1.0]}}), "has 1 experts, the lines before it 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    first = row(1, experts={"1": LOAD | {"share": [0.5, 0.5]}})
    path = write(tmp_path, first, line, row(3))
    with pytest.raises(ValueError, match=re.escape(f"{path} line 2: ") + ".*" + re.escape(message)):
        read_metrics(path)


def test_a_bad_last_line_that_has_its_end_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: is not JSON"):
        read_metrics(write(tmp_path, row(1), '{"step": 2, "tok'))
    with pytest.raises(ValueError, match="line 2: is not UTF-8"):
        path = write(tmp_path, row(1))
        path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
        read_metrics(path)


def test_an_empty_file_says_that_there_is_nothing_yet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole line"):
        read_metrics(write(tmp_path, end=""))
