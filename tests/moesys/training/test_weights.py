from __future__ import annotations

import pytest
import torch

from moesys.config import OptimizerConfig
from moesys.models.initialise import build
from moesys.testing.tiny import (
    arguments,
    cut,
    random_batch,
    random_model,
    random_trainer,
    snapshot,
    tiny,
    tiny_run,
)
from moesys.training.weights import MasterWeights, checkpoint_tensors, decays, make_optimizer

MODEL = tiny(num_layers=2, mtp_depth=1, tie_embeddings=False, shared_gate=True, q_lora_rank=3)
BATCH = random_batch(13, [[3, 2], [6], [1, 2, 3], [4]], 6)


def lowered(config=MODEL):
    model = build(config, 0, torch.float32, "cpu")
    model.load_state_dict(random_model(config, dtype=torch.float32).state_dict())
    return model, MasterWeights(model, torch.bfloat16)


def test_decay_only_on_matrices_that_are_no_norm_bias_embedding_head_or_router():
    gqa = tiny(attention="gqa", qkv_bias=True, qk_norm=True)
    decayed, spared = set(), set()
    for config in (MODEL, gqa):
        for name, parameter in build(config, 0, torch.float32, "cpu").named_parameters():
            (decayed if decays(name, parameter) else spared).add(name)
    assert {"embedding", "head", "norm.weight", "mtp.0.norm.weight", "mtp.0.hidden_norm.weight"} <= spared
    assert all(
        name in ("embedding", "head") or "norm" in name or name.endswith("bias") or "router" in name
        for name in spared
    )
    assert not any("norm" in name or name.endswith("bias") or "router" in name for name in decayed)
    assert {
        "blocks.0.attention.q_down.weight",
        "blocks.0.attention.q.weight",
        "blocks.0.feed_forward.w13.weight",
        "blocks.1.feed_forward.experts.w13",
        "blocks.1.feed_forward.experts.w2",
        "blocks.1.feed_forward.shared.w2.weight",
        "mtp.0.mix.weight",
    } <= decayed


def test_every_parameter_is_in_one_group():
    weights = MasterWeights(random_model(MODEL), torch.float64)
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.7), eps=1e-5, weight_decay=0.3)
    optimizer = make_optimizer(weights, config)
    names = {id(master): name for name, master in weights.masters.items()}
    groups = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups
    }
    assert groups.keys() == {0.3, 0.0}
    assert groups[0.3] | groups[0.0] == set(names.values())
    assert not groups[0.3] & groups[0.0]
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_has_no_second_copy(dtype):
    model = random_model(MODEL, dtype=dtype)
    weights = MasterWeights(model, dtype)
    assert all(weights.masters[name] is parameter for name, parameter in model.named_parameters())


def test_bfloat16_keeps_masters_routers_and_biases_in_float32():
    model, weights = lowered()
    start = random_model(MODEL, dtype=torch.float32).state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".router." in name else torch.bfloat16), name
        assert weights.masters[name].dtype == torch.float32
        assert torch.equal(weights.masters[name], start[name]), name
    for _, moe in model.moe_layers():
        assert moe.router.bias.dtype == torch.float32


def test_bfloat16_gradients_add_up_in_float32():
    model, weights = lowered()
    single = []
    for part in cut(BATCH, 1):
        model(*arguments(part)).ce.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        single.append({name: gradient.clone() for name, gradient in weights.gradients().items()})
        weights.clear_gradients()
    for part in cut(BATCH, 1):
        model(*arguments(part)).ce.backward()
    low = 0
    for name, total in weights.gradients().items():
        assert total.dtype == torch.float32
        want = sum((one[name] for one in single), torch.zeros_like(total))
        assert torch.equal(total, want), name
        low += not torch.equal(total, total.to(torch.bfloat16).float())
    assert low > 5, "the sums would fit bfloat16, so this shows nothing"


def test_gradients_of_a_bfloat16_model_are_those_of_the_float32_one():
    model, weights = lowered()
    full = random_model(MODEL, dtype=torch.float32)
    full.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    model(*arguments(BATCH)).ce.backward(), full(*arguments(BATCH)).ce.backward()
    flips = any(
        not torch.equal(a.chosen, b.chosen)
        for a, b in zip(
            model(*arguments(BATCH)).routing.values(), full(*arguments(BATCH)).routing.values(), strict=True
        )
    )
    assert not flips, "another seed is needed: a near-tie was decided otherwise"
    for name, parameter in full.named_parameters():
        if parameter.grad is not None:
            error = (weights.gradients()[name] - parameter.grad).norm() / parameter.grad.norm().clamp(
                min=1e-3
            )
            assert error < 0.1, name


def test_publish_rounds_the_masters():
    model, weights = lowered()
    with torch.no_grad():
        for master in weights.masters.values():
            master.add_(0.001)
    weights.publish()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights.masters[name].to(parameter.dtype)), name


def test_steps_smaller_than_bfloat16_add_up():
    # 50 steps of 4e-4 move a weight near 1 by 0.02; in bfloat16 alone, whose spacing there is 2^-7, none would
    config = tiny_run(tiny(), precision="bfloat16", steps=50, optimizer={"lr": 4e-4, "schedule": "constant"})
    trainer = random_trainer(config)
    name = "blocks.1.attention_norm.weight"
    start = trainer.weights.masters[name].detach().clone()
    for _ in range(50):
        trainer.train_step([BATCH])
    moved = (trainer.weights.masters[name] - start).abs().max()
    assert moved > 0.005
    parameter = dict(trainer.model.named_parameters())[name]
    assert not torch.equal(parameter.float(), start.to(torch.bfloat16).float())


def test_bfloat16_run_is_close_to_float32():
    optimizer = {"lr": 0.002}
    low, full = (
        random_trainer(tiny_run(tiny(d_model=32), precision=precision, optimizer=optimizer))
        for precision in ("bfloat16", "float32")
    )
    for step in range(3):
        batch = cut(random_batch(13, [[6], [6], [6], [6]], 6, seed=step), 2)
        one, two = low.train_step(batch), full.train_step(batch)
        assert one.ce_loss == pytest.approx(two.ce_loss, rel=0.01)
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=0.15)
    assert all(v.dtype == torch.float32 for n, v in snapshot(low).items())


def test_names_of_a_checkpoint():
    model, weights = lowered()
    optimizer = make_optimizer(weights, OptimizerConfig())
    tensors = checkpoint_tensors(weights, optimizer)
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    assert buffers == {"blocks.1.feed_forward.router.bias", "mtp.0.block.feed_forward.router.bias"}
    wanted = {f"model/{name}" for name in parameters | buffers}
    wanted |= {f"optimizer/{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in parameters}
    assert set(tensors) == wanted
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_a_parameter_that_no_loss_reaches_is_left_alone():
    # the prediction module's own norm gets no gradient from the main loss
    model = random_model(MODEL)
    weights = MasterWeights(model, torch.float64)
    model(*arguments(BATCH)).ce.backward()
    assert "mtp.0.norm.weight" not in weights.gradients()
    assert "norm.weight" in weights.gradients()
