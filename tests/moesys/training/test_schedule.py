from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesys.config import OptimizerConfig
from moesys.training.schedule import learning_rate

SCHEDULES = ["cosine", "linear", "wsd", "step", "constant"]


def rate(step: int, steps: int = 110, **fields) -> float:
    fields = {"lr": 2.0, "warmup_share": 1 / 11, "min_lr_ratio": 0.1, **fields}
    return learning_rate(OptimizerConfig(**fields), step, steps)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up(schedule):
    assert rate(1, schedule=schedule) == pytest.approx(0.2)
    assert rate(5, schedule=schedule) == pytest.approx(1.0)
    assert rate(10, schedule=schedule) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("schedule", "step", "want"),
    [
        # 100 steps after the warm-up, minimum 0.1 * 2
        ("cosine", 35, 0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 60, 0.2 + 1.8 / 2),
        ("cosine", 110, 0.2),
        ("linear", 35, 2 - 1.8 * 0.25),
        ("linear", 60, 1.1),
        ("linear", 110, 0.2),
        # the last 20% of 110 steps: from 88 on
        ("wsd", 11, 2.0),
        ("wsd", 88, 2.0),
        ("wsd", 99, 1.1),
        ("wsd", 110, 0.2),
        # multiplied by 0.316 after 66 and after 99 of 110 steps
        ("step", 66, 2.0),
        ("step", 67, 2 * 0.316),
        ("step", 99, 2 * 0.316),
        ("step", 100, 2 * 0.316**2),
        ("step", 110, 2 * 0.316**2),
        ("constant", 60, 2.0),
        ("constant", 110, 2.0),
    ],
)
def test_by_hand(schedule, step, want):
    assert rate(step, schedule=schedule) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warm_up(schedule):
    assert rate(1, 100, warmup_share=0.0, schedule=schedule) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_as_long_as_the_run(schedule):
    assert rate(10, 10, warmup_share=1.0, schedule=schedule) == pytest.approx(2.0)
    assert rate(1, 1, warmup_share=0.0, schedule=schedule) > 0


def test_other_milestones_and_shares():
    fields = {"schedule": "step", "warmup_share": 0.0, "step_milestones": (0.5,), "step_factor": 0.1}
    assert [rate(step, 4, **fields) for step in (1, 2, 3, 4)] == pytest.approx([2, 2, 0.2, 0.2])
    fields = {"schedule": "wsd", "warmup_share": 0.0, "decay_share": 0.5, "min_lr_ratio": 0.0}
    assert [rate(step, 4, **fields) for step in (1, 2, 3, 4)] == pytest.approx([2, 2, 1, 0])
    fields["decay_share"] = 1.0
    assert [rate(step, 4, **fields) for step in (1, 2, 3, 4)] == pytest.approx([1.5, 1, 0.5, 0])


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 200),
    share=st.floats(0, 1),
    ratio=st.floats(0, 1),
)
def test_rises_to_the_peak_and_never_after(schedule, steps, share, ratio):
    fields = {"schedule": schedule, "warmup_share": share, "min_lr_ratio": ratio}
    warmup = int(share * steps)
    rates = [rate(step, steps, **fields) for step in range(1, steps + 1)]
    assert all(0 <= r <= 2 * (1 + 1e-12) for r in rates)
    assert all(b > a for a, b in pairwise(rates[:warmup]))
    tail = rates[warmup:]
    assert all(b <= a + 1e-12 for a, b in pairwise(tail))
