"""Steps that are not finite: skipped, nothing changed, and the culprit named."""

from __future__ import annotations

import math

import pytest
import torch

from moesys.testing.tiny import cut, random_batch, random_trainer, snapshot, tiny, tiny_run
from moesys.training.diagnose import locate_nonfinite
from moesys.training.trainer import Trainer

MODEL = tiny(num_layers=3, mtp_depth=1)


def batches(step: int = 0):
    return cut(random_batch(13, [[3, 2], [6], [4], [1, 5]], 6, seed=step), 2)


def assert_skipped(trainer: Trainer, name: str) -> None:
    before = snapshot(trainer)
    step = trainer.step
    result = trainer.train_step(batches())
    assert result.skipped
    assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    assert trainer.step == step + 1
    for key, value in snapshot(trainer).items():
        torch.testing.assert_close(value, before[key], atol=0, rtol=0, equal_nan=True)
    assert locate_nonfinite(trainer, batches()) == name


@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "embedding",
        "blocks.0.attention.kv_down.weight",
        "blocks.1.feed_forward.experts.w2",
        "blocks.2.feed_forward.router.weight",
        "mtp.0.norm.weight",
    ],
)
def test_gradient(name, value, clip):
    trainer = random_trainer(tiny_run(MODEL, optimizer={"clip": clip}))
    trainer.train_step(batches(1))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[3] = value
        return spoilt

    handle = dict(trainer.model.named_parameters())[name].register_hook(spoil)
    assert_skipped(trainer, f"the gradient of {name}")
    handle.remove()
    # and it goes on as if the step had not been
    good = random_trainer(tiny_run(MODEL, optimizer={"clip": clip}))
    good.train_step(batches(1))
    good.step += 1
    assert trainer.train_step(batches(2)).loss == good.train_step(batches(2)).loss
    after = snapshot(good)
    assert all(torch.equal(v, after[k]) for k, v in snapshot(trainer).items())


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["blocks.1.attention.kv_up.weight", "blocks.2.feed_forward.experts.w13", "norm.weight"]
)
def test_weight(name, precision):
    trainer = random_trainer(tiny_run(MODEL, precision=precision))
    trainer.tensors()[f"model/{name}"].view(-1)[:] = math.nan
    trainer.loaded(0)
    assert_skipped(trainer, f"the weight {name}")


@pytest.mark.parametrize(
    "module",
    [
        "blocks.0.attention.kv_up",
        "blocks.1.feed_forward.experts",
        "blocks.2.feed_forward.shared",
        "mtp.0.mix",
    ],
)
def test_layer_output(module):
    trainer = random_trainer(tiny_run(MODEL))
    layer = trainer.model.get_submodule(module)
    layer.register_forward_hook(lambda _, __, output: output * math.inf)
    assert_skipped(trainer, f"the output of {module}")


def test_loss():
    # logits of 1e200 are finite, the cross-entropy's sum of a weight of 0 and an infinite logit is not
    trainer = random_trainer(tiny_run(tiny(tie_embeddings=False), precision="float32"))
    trainer.tensors()["model/head"].fill_(3e38)
    before = snapshot(trainer)
    assert trainer.train_step(batches()).skipped
    assert all(torch.equal(v, before[k]) for k, v in snapshot(trainer).items())
    assert locate_nonfinite(trainer, batches()) in ("the sum of the loss", "the gradient of norm.weight")


def test_a_good_step_is_not_skipped():
    trainer = random_trainer(tiny_run(MODEL))
    assert not trainer.train_step(batches()).skipped
