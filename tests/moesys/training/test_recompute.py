from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moesys.models.transformer import Transformer
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
from moesys.training.recompute import apply_recompute

PARTS = [
    "block",
    "moe",
    "experts",
    "attention",
    "feed_forward",
    "attention,experts",
    "moe, attention",
    "experts,feed_forward,attention",
    "block,moe,experts,attention,feed_forward",
]
MODEL = tiny(num_layers=3, moe_layers="1:", mtp_depth=1, shared_gate=True)
BATCH = random_batch(13, [[3, 2], [6], [1, 2, 3], [4]], 6)


def loss_of(model: Transformer) -> Tensor:
    sums = model(*arguments(BATCH))
    penalties = [
        r.load_balance_sum + r.z_sum + r.probability_sum.square().sum() for r in sums.routing.values()
    ]
    return sums.ce + sum(sums.mtp) + 0.1 * sum(penalties)


@pytest.mark.parametrize("text", PARTS)
def test_a_step_is_the_same(text):
    # B2, A11: losses, counts, gradients, update, bias
    reference, trainer = (random_trainer(tiny_run(MODEL, recompute=spec)) for spec in ("", text))
    for step in range(2):
        batch = cut(random_batch(13, [[3, 2], [6], [1, 2, 3], [4]], 6, seed=step), 2)
        want, got = reference.train_step(batch), trainer.train_step(batch)
        for name in ("loss", "ce_loss", "mtp_loss", "load_balance_loss", "z_loss", "grad_norm", "tokens"):
            assert getattr(got, name) == getattr(want, name), name
        assert got.counts.figures() == want.counts.figures()
        assert all(int(chosen.sum()) == 21 * 2 for chosen in got.counts.chosen.values())
    left, right = snapshot(trainer), snapshot(reference)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def packed_bytes(model: Transformer) -> int:
    """Bytes that a forward keeps for its backward."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    return total


@pytest.mark.parametrize("text", PARTS)
def test_less_is_kept(text):
    plain, model = random_model(MODEL), random_model(MODEL)
    apply_recompute(model, text)
    assert packed_bytes(model) < packed_bytes(plain)


def test_block_keeps_least():
    kept = {}
    for text in ("", "moe", "block"):
        model = random_model(MODEL)
        apply_recompute(model, text)
        kept[text] = packed_bytes(model)
    assert kept["block"] < 0.5 * kept["moe"] < 0.5 * kept[""]


class Selections:
    """Every selection that a model's routers make."""

    def __init__(self, model: Transformer) -> None:
        self.seen: dict[int, list[Tensor]] = {}
        for layer, moe in model.moe_layers():
            self.seen[layer] = []
            moe.router.register_forward_hook(
                lambda module, inputs, assignment, layer=layer: self.seen[layer].append(assignment.experts)
            )


@pytest.mark.parametrize("text", ["block", "moe", "block,moe"])
@pytest.mark.parametrize("ties", [False, True])
def test_routing_is_replayed_even_if_it_would_come_out_differently(text, ties):
    # K5: selections flip between the two runs, by new weights or by a bias that breaks the ties another way
    model = random_model(MODEL)
    apply_recompute(model, text)
    if ties:
        with torch.no_grad():
            for _, moe in model.moe_layers():
                moe.router.weight.zero_(), moe.router.bias.zero_()
    selections = Selections(model)
    loss = loss_of(model)
    first = {layer: list(seen) for layer, seen in selections.seen.items()}
    for _, moe in model.moe_layers():
        if ties:
            moe.router.bias.data = torch.tensor([0.0, 0.0, 1e-9, 2e-9], dtype=torch.float64)
        else:
            moe.router.weight.data = -moe.router.weight.data
    loss.backward()
    for layer, seen in selections.seen.items():
        assert len(first[layer]) == 1
        again = seen[1:]
        assert again, "nothing was computed again"
        assert all(torch.equal(selection, first[layer][0]) for selection in again)
    if ties:
        assert all((seen[0] == torch.tensor([0, 1])).all() for seen in selections.seen.values())


class _Sorts(TorchDispatchMode):
    """Counts sorts of score matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kinds = (torch.ops.aten.sort, torch.ops.aten.topk, torch.ops.aten.argsort)
        if function.overloadpacket in kinds and args[0].dim() == 2:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", ["", "block", "moe", "block,moe"])
def test_the_backward_selects_nothing(text):
    model = random_model(MODEL)
    apply_recompute(model, text)
    with _Sorts() as forward:
        loss = loss_of(model)
    with _Sorts() as backward:
        loss.backward()
    assert (forward.count, backward.count) == (3, 0)


@pytest.mark.parametrize("text", ["block", "moe"])
def test_two_forwards_before_a_backward_do_not_mix(text):
    # a second micro-batch (or an evaluation) between forward and backward must not replay the first one's routing
    plain, model = random_model(MODEL), random_model(MODEL)
    apply_recompute(model, text)
    other = random_batch(13, [[6], [6], [6]], 6, seed=9)
    for m in (plain, model):
        first = loss_of(m)
        with torch.no_grad():
            m(*arguments(other))
        second = m(*arguments(other)).ce
        (first + 2 * second).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_evaluation_recomputes_nothing():
    model = random_model(MODEL)
    want = loss_of(model).item()
    apply_recompute(model, "block,attention")
    with torch.no_grad():
        assert loss_of(model).item() == want


def test_unknown_part():
    with pytest.raises(
        ValueError, match=r"'mlp' is not \"block\" or one of attention, feed_forward, experts, moe"
    ):
        apply_recompute(random_model(MODEL), "attention,mlp")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_precisions(precision):
    results = []
    for text in ("", "block", "moe,attention"):
        trainer = random_trainer(tiny_run(MODEL, recompute=text, precision=precision))
        results.append((trainer.train_step(cut(BATCH, 2)).grad_norm, snapshot(trainer)))
    for norm, state in results[1:]:
        assert norm == results[0][0]
        assert all(torch.equal(value, results[0][1][name]) for name, value in state.items())
