"""Whole optimiser steps against a naive step, and against themselves cut differently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.config import RunConfig
from moesys.data import Batch
from moesys.testing import naive_model
from moesys.testing.tiny import (
    arguments,
    cut,
    random_batch,
    random_trainer,
    snapshot,
    tiny,
    tiny_run,
    weights_of,
)
from moesys.training.schedule import learning_rate
from moesys.training.trainer import StepResult, Trainer

ROWS = [[3, 2], [6], [1, 2, 3], [4]]
MODELS = {
    "mla": {},
    "gqa, softmax": {"attention": "gqa", "router": "softmax", "qkv_bias": True, "tie_embeddings": False},
    "two prediction modules": {"mtp_depth": 2},
    "dense between MoE": {"num_layers": 3, "moe_layers": "0,2"},
}
SCOPES = ["sequence", "batch"]


def batches(step: int, rows: list[list[int]] = ROWS) -> Batch:
    return random_batch(13, rows, 6, seed=100 + step)


def run(config: RunConfig, micro: int, steps: int = 3, rows: list[list[int]] = ROWS):
    trainer = random_trainer(config)
    results = [trainer.train_step(cut(batches(step, rows), micro)) for step in range(steps)]
    return trainer, results


def figures(result: StepResult) -> dict[str, float]:
    names = ("loss", "ce_loss", "mtp_loss", "load_balance_loss", "z_loss", "grad_norm", "lr", "tokens")
    return {name: getattr(result, name) for name in names}


def assert_same_run(first: Trainer, second: Trainer, results: list[list[StepResult]]) -> None:
    for one, two in zip(*results, strict=True):
        assert figures(one) == pytest.approx(figures(two), rel=1e-12, abs=1e-13)
        assert one.counts.figures() == two.counts.figures()
    left, right = snapshot(first), snapshot(second)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], atol=1e-11, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_steps_against_the_naive_step(changes, scope):
    model = tiny(**changes)
    rows = [[3, 2], [6], [1, 2, 3], []]
    config = tiny_run(model, balance={"loss_scope": scope}, optimizer={"schedule": "constant"})
    trainer = random_trainer(config)
    start = {name: value.detach() for name, value in weights_of(trainer.model).items()}
    rates = [0.02] * 3
    weights, gradients = weights_of(trainer.model), []
    for step in range(3):
        result = trainer.train_step(cut(batches(step, rows), 2))
        want = naive_model.loss(model, weights, arguments(batches(step, rows)), config.balance, 0.3)
        want.total.backward()
        gradients.append({name: w.grad for name, w in weights.items() if w.grad is not None})
        names = {name for name in weights if not name.endswith("router.bias")}
        assert set(gradients[-1]) == names
        state = naive_model.adamw(
            {n: start[n] for n in names}, gradients, config.optimizer, rates[: step + 1]
        )
        for name in names:
            for key, value in (
                (f"model/{name}", state.values),
                (f"optimizer/exp_avg/{name}", state.first),
                (f"optimizer/exp_avg_sq/{name}", state.second),
            ):
                torch.testing.assert_close(
                    trainer.tensors()[key], value[name], atol=1e-10, rtol=0, msg=lambda m, n=key: f"{n}: {m}"
                )
        assert figures(result) == pytest.approx(
            {
                "loss": want.total.item(),
                "ce_loss": want.ce,
                "mtp_loss": want.mtp,
                "load_balance_loss": want.load_balance,
                "z_loss": want.z,
                "grad_norm": state.norms[-1],
                "lr": rates[step],
                "tokens": 17,
            },
            rel=1e-10,
        )
        assert {layer: counts.tolist() for layer, counts in result.counts.chosen.items()} == want.counts
        for name in weights:
            if name.endswith("router.bias"):
                layer = _layer_of(name, model.num_layers)
                load = want.counts[layer]
                mean = sum(load) / len(load)
                for expert, count in enumerate(load):
                    start[name][expert] += 0.01 * ((mean > count) - (mean < count))
                torch.testing.assert_close(
                    trainer.tensors()[f"model/{name}"], start[name], atol=1e-14, rtol=0
                )
        weights = weights_of(trainer.model)


def _layer_of(name: str, num_layers: int) -> int:
    kind, number = name.split(".")[:2]
    return int(number) + (num_layers if kind == "mtp" else 0)


@pytest.mark.parametrize("coef", [0.3, 0.0])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_accumulation_changes_nothing(changes, scope, coef):
    # A6, A8, A12, B1: also with rows of different lengths and one of padding only
    config = tiny_run(tiny(**changes), balance={"loss_scope": scope, "loss_coef": coef})
    rows = [*ROWS, [], [2, 2], [5], [1]]
    whole, results = run(config, 8, rows=rows)
    for micro in (4, 2, 1):
        part, others = run(config, micro, rows=rows)
        assert_same_run(part, whole, [others, results])


def test_the_two_scopes_differ():
    one, two = (run(tiny_run(balance={"loss_scope": scope}), 2, steps=1)[1][0] for scope in SCOPES)
    assert one.ce_loss == two.ce_loss
    assert one.load_balance_loss != pytest.approx(two.load_balance_loss, rel=1e-3)


@pytest.mark.parametrize("penalty", ["loss_coef", "z_loss_coef"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_penalty_reaches_the_router(penalty, scope):
    # A5, A16
    name = "optimizer/exp_avg/blocks.1.feed_forward.router.weight"
    moments = []
    for coef in (0.0, 1.0):
        balance = {"loss_coef": 0.0, "z_loss_coef": 0.0, "loss_scope": scope, penalty: coef}
        trainer, _ = run(tiny_run(balance=balance, optimizer={"clip": 0.0}), 2, steps=1)
        moments.append(trainer.tensors()[name])
    assert (moments[0] - moments[1]).norm() > 1e-3 * moments[0].norm()


@pytest.mark.parametrize("micro", [4, 1])
def test_a_bias_moves_by_one_rate_per_step(micro):
    # B1
    trainer = random_trainer(tiny_run())
    name = "model/blocks.1.feed_forward.router.bias"
    for step in range(4):
        before = trainer.tensors()[name].clone()
        result = trainer.train_step(cut(batches(step), micro))
        load = result.counts.chosen[1]
        want = 0.01 * torch.sign(load.double().mean() - load)
        torch.testing.assert_close(trainer.tensors()[name] - before, want, atol=1e-14, rtol=0)
        assert want.abs().max() > 0


def test_no_bias_moves_at_rate_zero():
    trainer, _ = run(tiny_run(balance={"bias_rate": 0.0}), 2)
    start = random_trainer(tiny_run())
    name = "model/blocks.1.feed_forward.router.bias"
    assert torch.equal(trainer.tensors()[name], start.tensors()[name])


def test_every_moe_layer_among_dense_ones_moves_its_bias():
    # B4
    model = tiny(num_layers=5, moe_layers="1,3", mtp_depth=1)
    trainer = random_trainer(tiny_run(model))
    before = snapshot(trainer)
    result = trainer.train_step(cut(batches(0), 2))
    moved = {
        n for n, v in trainer.tensors().items() if n.endswith("router.bias") and not torch.equal(v, before[n])
    }
    assert moved == {
        f"model/{block}.feed_forward.router.bias" for block in ("blocks.1", "blocks.3", "mtp.0.block")
    }
    assert sorted(result.counts.chosen) == [1, 3, 5]


@pytest.mark.parametrize("micro", [4, 2, 1])
def test_counts_are_tokens_times_choices(micro):
    # B2
    _, results = run(tiny_run(tiny(num_layers=3)), micro)
    for result in results:
        assert result.tokens == 21
        for chosen in result.counts.chosen.values():
            assert int(chosen.sum()) == 21 * 2
        for layer in result.counts.figures().values():
            assert layer["dropped_share"] == 0
            assert sum(layer["share"]) == pytest.approx(1)


def test_dense_model_has_no_experts():
    _, results = run(tiny_run(tiny(moe_layers="")), 2)
    assert results[0].counts.figures() == {}
    assert results[0].load_balance_loss == results[0].z_loss == 0
    assert results[0].loss == results[0].ce_loss


def test_clipping_is_exact_and_the_norm_is_from_before():
    states = {}
    for clip in (0.0, 0.1, 1e9):
        trainer, (result,) = run(tiny_run(optimizer={"clip": clip}), 2, steps=1)
        states[clip] = (snapshot(trainer), result.grad_norm)
    norm = states[0.0][1]
    assert norm > 0.2
    assert [n for _, n in states.values()] == pytest.approx([norm] * 3, rel=1e-13)
    free = [v for n, v in states[0.0][0].items() if n.startswith("optimizer/exp_avg/")]
    assert torch.stack([m.norm() for m in free]).norm().item() == pytest.approx(0.1 * norm, rel=1e-12)
    for name, value in states[0.1][0].items():
        factor = 0.1 / (norm + 1e-6)
        if name.startswith("optimizer/exp_avg/"):
            torch.testing.assert_close(value, states[0.0][0][name] * factor, atol=1e-15, rtol=1e-12)
        if name.startswith("optimizer/exp_avg_sq/"):
            torch.testing.assert_close(value, states[0.0][0][name] * factor**2, atol=1e-15, rtol=1e-12)
    for name, value in states[1e9][0].items():
        assert torch.equal(value, states[0.0][0][name]), name


def test_mtp_weight_zero_leaves_the_rest_as_without_modules():
    balance = {"loss_coef": 0.0, "z_loss_coef": 0.0}
    optimizer = {"clip": 0.0, "weight_decay": 0.0}
    with_modules = random_trainer(
        tiny_run(tiny(mtp_depth=1), balance=balance, optimizer=optimizer, mtp_weight=0.0)
    )
    without = random_trainer(tiny_run(balance=balance, optimizer=optimizer))
    for name, value in without.tensors().items():
        value.copy_(with_modules.tensors()[name])
    before = snapshot(with_modules)
    for trainer in (with_modules, without):
        trainer.train_step(cut(batches(0), 2))
    for name, value in without.tensors().items():
        torch.testing.assert_close(value, with_modules.tensors()[name], atol=1e-13, rtol=0)
    for name, value in with_modules.tensors().items():
        if name.startswith("model/mtp.") and "bias" not in name:
            assert torch.equal(value, before[name])


def test_the_rate_of_each_step():
    config = tiny_run(optimizer={"warmup_share": 1 / 3, "schedule": "linear"}, steps=6)
    _, results = run(config, 2, steps=6)
    assert [r.lr for r in results] == [learning_rate(config.optimizer, step, 6) for step in range(1, 7)]
    assert results[0].lr == pytest.approx(0.01)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_going_on_from_its_tensors_gives_the_same_bits(precision):
    # B9, C6: nothing that matters is outside of them
    config = tiny_run(tiny(mtp_depth=1), precision=precision)
    trainer, _ = run(config, 2)
    saved = snapshot(trainer)
    other = Trainer(config, torch.device("cpu"))
    assert other.tensors().keys() == saved.keys()
    for name, value in other.tensors().items():
        value.copy_(saved[name])
    other.loaded(3)
    for step in (3, 4):
        one, two = (t.train_step(cut(batches(step), 2)) for t in (trainer, other))
        assert figures(one) == figures(two)
    for name, value in other.tensors().items():
        assert torch.equal(value, trainer.tensors()[name]), name


def test_same_seed_same_run_and_another_seed_another():
    def losses(seed: int) -> list[float]:
        trainer = Trainer(tiny_run(seed=seed), torch.device("cpu"))
        return [trainer.train_step(cut(batches(step), 2)).loss for step in range(2)]

    assert losses(0) == losses(0) != losses(1)


def test_it_learns():
    config = tiny_run(tiny(mtp_depth=1), steps=40, precision="float32", optimizer={"lr": 0.02})
    trainer = random_trainer(config)
    batch = cut(batches(0), 2)
    results = [trainer.train_step(batch) for _ in range(40)]
    assert results[-1].ce_loss < 0.5 * results[0].ce_loss
    assert results[-1].mtp_loss < results[0].mtp_loss


def tensors_of(trainer: Trainer, prefix: str) -> dict[str, Tensor]:
    return {n: v for n, v in trainer.tensors().items() if n.startswith(prefix)}


def test_float32_is_close_to_float64():
    low, low_results = run(tiny_run(precision="float32"), 2)
    full, results = run(tiny_run(), 2)
    for one, two in zip(low_results, results, strict=True):
        assert figures(one) == pytest.approx(figures(two), rel=1e-4)
    for name, value in tensors_of(low, "model/").items():
        assert value.dtype == torch.float32
        assert (value - full.tensors()[name]).abs().max() < 1e-3, name
