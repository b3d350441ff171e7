"""The benchmark of the training step, with a clock of its own or on tiny models: no test here is about speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from moesys import benchmarks, machine
from moesys.benchmarks import step, transformers_models
from moesys.benchmarks.contender import Contender, draw_tokens
from moesys.benchmarks.families import FAMILIES
from moesys.benchmarks.memory import peak_memory_alone
from moesys.benchmarks.moesys_model import moesys_contender
from moesys.benchmarks.step_results import Spread
from moesys.benchmarks.transformers_models import Implementation, find_best


def pretender(name: str) -> Contender:
    model = torch.nn.Linear(2, 2)
    return Contender(
        name=name, model=model, loss=lambda tokens: model.weight.sum(), loads=lambda tokens: tokens
    )


@pytest.fixture
def small(monkeypatch):
    """The families as they are, but narrow, short and quick."""
    shapes = {"vocab_size": 512, "d_model": 64, "num_layers": 2, "d_expert": 32, "d_ff": 64}
    for name, build in list(FAMILIES.items()):
        monkeypatch.setitem(FAMILIES, name, lambda build=build: replace(build(), **shapes))


def test_sides_take_turns_on_the_same_batches(monkeypatch):
    taken = []

    def fake(contender, optimizer, tokens):
        taken.append((contender.name, int(tokens)))
        return (1.0 if contender.name == "a" else 3.0) * (1 + int(tokens)), float(len(taken))

    monkeypatch.setattr(step, "time_step", fake)
    monkeypatch.setattr(machine, "matmul_rate", lambda: 7.0)
    batches = [torch.tensor(index) for index in range(3)]
    sides = {name: pretender(name) for name in "ab"}
    rounds = step.take_turns(sides, batches, step.StepOptions(rounds=2, steps=2))
    assert taken[:4] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]  # not counted
    assert taken[4:8] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert taken[8:] == [("a", 2), ("a", 0), ("b", 2), ("b", 0)]
    assert [each.turns["a"].seconds for each in rounds] == [1.5, 2.0]
    assert [each.turns["b"].seconds for each in rounds] == [4.5, 6.0]
    assert [each.matmul_rate for each in rounds] == [7.0, 7.0]
    assert (rounds[0].turns["a"].first_loss, rounds[0].turns["a"].last_loss) == (5.0, 6.0)


def test_a_loss_that_is_not_finite_stops_the_measurement(monkeypatch):
    monkeypatch.setattr(step, "time_step", lambda *_: (1.0, float("nan")))
    with pytest.raises(RuntimeError, match="a: the loss"):
        step.take_turns({"a": pretender("a")}, [torch.tensor(0)] * 2, step.StepOptions(rounds=1))


def test_spread():
    assert Spread.of([3.0, 1.0, 8.0]) == Spread(min=1.0, median=3.0, max=8.0)


def test_search_drops_a_slow_way_early_and_takes_the_fastest(monkeypatch):
    """batched_mm must never see the whole batch: it would not fit. Slower first steps must not decide either."""
    now = SimpleNamespace(experts="", attention="")
    speed = {"eager": 1.0, "grouped_mm": 1.2, "batched_mm": 0.01}
    seen: list[tuple[str, str, int]] = []

    def fake(contender, optimizer, tokens):
        first = (now.experts, now.attention, tokens.numel()) not in seen
        seen.append((now.experts, now.attention, tokens.numel()))
        rate = speed[now.experts] * (1.1 if now.attention == "eager" else 1.0)
        return tokens.numel() / rate * (50 if first else 1), 0.0

    monkeypatch.setattr(transformers_models, "time_step", fake)
    contender = pretender("transformers")
    contender.model.set_experts_implementation = lambda name: setattr(now, "experts", name)
    contender.model.set_attn_implementation = lambda name: setattr(now, "attention", name)
    chosen, trials = find_best(contender, torch.zeros(4, 256, dtype=torch.int64))
    assert chosen == Implementation(experts="grouped_mm", attention="eager")
    assert {size for experts, _, size in seen if experts == "batched_mm"} == {128}
    assert {(experts, attention) for experts, attention, size in seen if size == 1024} == {
        ("eager", "eager"),
        ("eager", "sdpa"),
        ("grouped_mm", "eager"),
        ("grouped_mm", "sdpa"),
    }
    best = max((trial for trial in trials if trial.tokens == 1024), key=lambda trial: trial.tokens_per_second)
    assert best.tokens_per_second == pytest.approx(1.2 * 1.1)


@pytest.mark.timeout(120)
def test_memory_of_a_side_is_that_of_its_model_and_its_step():
    """float32 weights, gradients and two moments are 16 bytes a parameter; the rest of this step is small."""
    config = replace(FAMILIES["mixtral"](), vocab_size=64, d_expert=1024, num_layers=2)
    parameters = moesys_contender(config, seed=0).num_parameters()
    batch = draw_tokens(64, 1, 8, seed=0)
    peak = peak_memory_alone(partial(moesys_contender, seed=0), config, [batch, batch])
    assert 16 * parameters * 0.9 < peak < 16 * parameters * 1.5


@pytest.mark.timeout(180)
def test_command_measures_prints_and_writes(small, tmp_path, capsys):
    file = tmp_path / "step.json"
    line = "step --families qwen3-moe --rounds 2 --steps 1 --batch 2 --sequence 32 --json"
    before = torch.get_num_threads()
    assert benchmarks.main([*line.split(), str(file)]) == 0
    assert torch.get_num_threads() == before
    printed = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["command"] == f"moesys bench {line} {file}"
    assert record["versions"]["transformers"] and record["machine"]["processor"] and record["date"]
    result = record["families"]["qwen3-moe"]
    ours, theirs = result["moesys"], result["transformers"]
    attention, experts, router, norms = (
        4 * 64 * 256 - 2 * 64 * 128,
        32 * 3 * 64 * 32,
        32 * 64,
        2 * 64 + 2 * 64,
    )
    parameters = 2 * 512 * 64 + 2 * (attention + experts + router + norms) + 64
    assert ours["parameters"] == theirs["parameters"] == parameters
    for side in (ours, theirs):
        assert f"{side['parameters']:,}" in printed
        assert f"{side['tokens_per_second']['median']:,.0f}" in printed
        assert 0 < side["tokens_per_second"]["min"] <= side["tokens_per_second"]["max"]
        assert 0 < side["matmul_share"]["median"] < 1
        assert side["peak_memory_bytes"] > 16 * parameters / 2
        assert 1 <= side["imbalance"] <= 32 / 4
    assert len(result["speed_ratios"]) == 2
    assert result["speed_ratio"]["min"] == min(result["speed_ratios"])
    assert f"speed ratio {result['speed_ratio']['median']:.2f}" in printed
    assert result["config"]["num_experts"] == 32


def test_wrong_options_are_told_together():
    with pytest.raises(ValueError) as caught:
        benchmarks.main(["step", "--rounds", "0", "--sequence", "1", "--json", "/nowhere/at/all.json"])
    told = str(caught.value)
    assert "--rounds is at least 1; 0 came" in told
    assert "--sequence is at least 2; 1 came" in told
    assert "/nowhere/at/all.json" in told


def test_without_transformers_the_way_out_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        benchmarks.main(["step"])


def test_benchmarks_are_listed_and_a_wrong_name_is_refused(capsys):
    assert benchmarks.main([]) == 0
    assert "step" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"'stop'.*step"):
        benchmarks.main(["stop"])
