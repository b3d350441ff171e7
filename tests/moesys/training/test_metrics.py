from __future__ import annotations

import json
import math

import pytest
import torch

from moesys.testing.tiny import arguments, random_batch, random_model, tiny
from moesys.training.metrics import MetricsFile, RoutingCounts, peak_memory_bytes


def rows(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_counts_add_up_over_micro_batches():
    model = random_model(tiny(num_layers=3))
    counts, parts = RoutingCounts(), []
    for seed in range(3):
        sums = model(*arguments(random_batch(13, [[3, 2], [6]], 6, seed=seed)))
        before = {layer: report.chosen.clone() for layer, report in sums.routing.items()}
        counts.add(sums.routing)
        parts.append(before)
        assert all(torch.equal(report.chosen, before[layer]) for layer, report in sums.routing.items())
    for layer in (1, 2):
        assert torch.equal(counts.chosen[layer], parts[0][layer] + parts[1][layer] + parts[2][layer])
        assert counts.chosen[layer].dtype == torch.int64
    figures = counts.figures()
    assert list(figures) == ["1", "2"]
    assert set(figures["1"]) == {"share", "max_violation", "entropy", "dropped_share", "dead"}
    want = (counts.chosen[1].double() / counts.chosen[1].sum()).tolist()
    assert figures["1"]["share"] == pytest.approx(want)
    json.dumps(figures, allow_nan=False)


def test_a_step_is_a_line_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1, "loss": 2.5, "experts": {"1": {"share": [0.5, 0.5]}}})
    assert rows(path) == [{"step": 1, "loss": 2.5, "experts": {"1": {"share": [0.5, 0.5]}}}]
    file.write({"step": 2, "loss": 2.25})
    assert [row["step"] for row in rows(path)] == [1, 2]
    file.close()


def test_what_is_not_finite_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    row = {"step": 1, "loss": math.nan, "grad_norm": math.inf, "experts": {"1": {"share": [math.nan, 1.0]}}}
    file.write(row)
    file.close()
    assert rows(path) == [
        {"step": 1, "loss": None, "grad_norm": None, "experts": {"1": {"share": [None, 1.0]}}}
    ]
    assert math.isnan(row["loss"])


def test_going_on_drops_what_lies_beyond(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 2}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 6, "lo')  # a kill in the middle of a line
    file = MetricsFile(path, keep_steps=3)
    file.write({"step": 4, "loss": 9.0})
    file.close()
    assert path.read_text() == "".join(lines[:3]) + '{"step": 4, "loss": 9.0}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_end_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    file = MetricsFile(path, keep_steps=2)
    file.write({"step": 3})
    file.close()
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


def test_starting_over_empties_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_peak_memory():
    before = peak_memory_bytes(torch.device("cpu"))
    assert before > 50 * 2**20
    block = torch.ones(before // 4 + 2**26)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert block.sum() > 0
