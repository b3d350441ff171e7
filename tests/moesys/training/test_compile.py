from __future__ import annotations

import shutil

import pytest
import torch

from moesys.testing.tiny import cut, random_batch, random_trainer, snapshot, tiny, tiny_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++"),
]


def steps(compiled: bool, recompute: str, changes: dict) -> tuple[list[tuple[float, float]], dict]:
    trainer = random_trainer(tiny_run(tiny(**changes), compile=compiled, recompute=recompute))
    results = []
    for step in range(3):
        rows = [[6], [6], [6], [6]] if step == 0 else [[3, 2], [6], [4], [1, 5]]
        result = trainer.train_step(cut(random_batch(13, rows, 6, seed=step), 2))
        results.append((result.loss, result.grad_norm))
    return results, snapshot(trainer)


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [
        ({}, ""),
        ({"attention": "gqa", "router": "softmax"}, ""),
        ({}, "block"),
        ({}, "moe"),
        ({}, "attention"),
    ],
)
def test_compiled_blocks_give_the_same_numbers(changes, recompute):
    torch._dynamo.reset()
    (ours, state), (right, want) = (steps(compiled, recompute, changes) for compiled in (True, False))
    for one, two in zip(ours, right, strict=True):
        assert one == pytest.approx(two, rel=1e-10)
    for name, value in state.items():
        torch.testing.assert_close(value, want[name], atol=1e-8, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
