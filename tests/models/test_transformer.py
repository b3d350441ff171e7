from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesys.data import Batch
from moesys.models.config import ModelConfig
from moesys.models.presets import deepseek_v2
from moesys.models.transformer import LossSums, Transformer, prediction_targets
from moesys.routing.losses import batch_load_balance
from moesys.testing import naive_model, oracles
from moesys.testing.tiny import arguments, random_batch, random_model, tiny, weights_of

VARIANTS = {
    "mla": {},
    "mla, untied, low-rank queries": {"q_lora_rank": 3, "tie_embeddings": False},
    "gqa with norm and bias": {
        "attention": "gqa",
        "qk_norm": True,
        "qkv_bias": True,
        "tie_embeddings": False,
    },
    "softmax groups by the best": {
        "router": "softmax",
        "normalize_weights": False,
        "num_experts": 6,
        "num_groups": 3,
        "top_groups": 2,
        "group_score": "max",
        "num_shared_experts": 2,
        "shared_gate": True,
    },
    "dense": {"moe_layers": ""},
    "MoE, dense, MoE": {"num_layers": 3, "moe_layers": "0,2", "num_shared_experts": 0},
    "one prediction module": {"mtp_depth": 1},
    "two prediction modules, yarn": {
        "mtp_depth": 2,
        "num_layers": 1,
        "moe_layers": "0",
        "tie_embeddings": False,
        "yarn_factor": 4.0,
        "yarn_original_length": 16,
    },
    "dense with a prediction module": {"moe_layers": "", "mtp_depth": 1, "activation": "geglu"},
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
ROWS = [[3, 2], [6], [1, 2, 3]]


def scalar(sums: LossSums, config: ModelConfig) -> Tensor:
    """Everything that a model's forward gives, in one number with uneven weights."""
    total = 0.7 * sums.ce
    for depth, value in enumerate(sums.mtp):
        total = total + (0.3 + depth) * value
    for layer, report in sums.routing.items():
        factor = 1 + 0.1 * layer
        total = total + factor * (0.2 * report.load_balance_sum + 0.05 * report.z_sum)
        total = total + factor * batch_load_balance(report.probability_sum, report.chosen, 17, config.top_k)
    return total


def naive_scalar(weights: dict[str, Tensor], batch: Batch, config: ModelConfig) -> Tensor:
    """The same of the naive model."""
    sums = naive_model.run(config, weights, *arguments(batch))
    total = 0.7 * sums.ce
    for depth, value in enumerate(sums.mtp):
        total = total + (0.3 + depth) * value
    for layer, rows in sums.rows.items():
        factor = 1 + 0.1 * layer
        everything = [token for row in rows for token in row]
        per_row = sum(oracles.load_balance(row, config) for row in rows)
        total = total + factor * (0.2 * per_row + 0.05 * oracles.z_loss_sum(everything))
        whole = oracles.load_balance(everything, config) * (len(everything) / 17) ** 2
        total = total + factor * whole
    return total


@each_variant
def test_losses_and_every_gradient_against_the_naive_model(changes):
    config = tiny(**changes)
    model = random_model(config)
    weights = weights_of(model)
    batch = random_batch(config.vocab_size, ROWS, 6)
    ours = scalar(model(*arguments(batch), chunk=4), config)
    right = naive_scalar(weights, batch, config)
    torch.testing.assert_close(ours, right, atol=0, rtol=1e-12)
    ours.backward(), right.backward()
    for name, parameter in model.named_parameters():
        want = weights[name].grad
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(
            parameter.grad, want, atol=1e-11 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert want.abs().max() > 0 or name.endswith("k.bias"), name


@pytest.mark.parametrize(
    "changes", [{"mtp_depth": 1}, {"attention": "gqa", "qk_norm_whole": True, "qkv_bias": True}]
)
def test_finite_differences(changes):
    config = tiny(num_layers=2, tie_embeddings=False, **changes)
    model = random_model(config)
    batch = random_batch(config.vocab_size, ROWS, 6)
    scalar(model(*arguments(batch)), config).backward()
    generator = torch.Generator().manual_seed(0)
    step = 1e-5
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        largest = int(parameter.grad.abs().argmax())
        for index in {largest, int(torch.randint(flat.numel(), (1,), generator=generator))}:
            before = flat[index].item()
            ends = []
            for value in (before + step, before - step):
                flat[index] = value
                with torch.no_grad():
                    ends.append(float(scalar(model(*arguments(batch)), config)))
            flat[index] = before
            slope = (ends[0] - ends[1]) / (2 * step)
            assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, abs=2e-6, rel=1e-5), name


@each_variant
def test_packed_and_padded_rows_equal_documents_alone(changes):
    config = tiny(**changes)
    model = random_model(config)
    batch = random_batch(config.vocab_size, [[3, 2], [4]], 6)
    together = model.hidden(batch.tokens, batch.positions, batch.documents)
    for row in range(2):
        for document in range(int(batch.documents[row].max()) + 1):
            own = batch.documents[row] == document
            alone = [value[row : row + 1, own] for value in (batch.tokens, batch.positions)]
            got = model.hidden(*alone, torch.zeros_like(alone[0]))
            pairs = zip((got.main, *got.predicted), (together.main, *together.predicted), strict=True)
            for ours, packed in pairs:
                torch.testing.assert_close(ours[0], packed[row, own], atol=1e-12, rtol=0)


@each_variant
def test_what_stands_in_the_padding_does_not_matter(changes):
    config = tiny(**changes)
    model = random_model(config)
    batch = random_batch(config.vocab_size, [[3, 2], [4]], 8)
    padding = batch.documents == -1
    other = replace(batch, tokens=torch.where(padding, (batch.tokens + 5) % config.vocab_size, batch.tokens))
    gradients = []
    for b in (batch, other):
        model.zero_grad()
        sums = model(*arguments(b))
        scalar(sums, config).backward()
        gradients.append((sums.ce.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], atol=1e-12, rtol=0)
    for one, two in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(one, two, atol=1e-11, rtol=0)


def test_prediction_targets_are_shifted_and_end_with_the_document():
    labels = torch.tensor([[11, 12, 13, 14, 15, 16, -100, -100]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    none = -100
    want = {
        0: [11, 12, 13, 14, 15, 16, none, none],
        1: [12, 13, none, 15, 16, none, none, none],
        2: [13, none, none, 16, none, none, none, none],
        3: [none] * 8,
        9: [none] * 8,
    }
    for depth, targets in want.items():
        assert prediction_targets(labels, documents, depth).tolist() == [targets]
    assert labels.tolist() == [[11, 12, 13, 14, 15, 16, -100, -100]]


def test_the_last_positions_of_a_row_have_no_further_target():
    labels, documents = torch.arange(12).view(2, 6), torch.zeros(2, 6, dtype=torch.int64)
    for depth in (1, 2, 5, 6, 7):
        got = prediction_targets(labels, documents, depth)
        kept = max(0, 6 - depth)
        assert torch.equal(got[:, :kept], labels[:, depth:])
        assert (got[:, kept:] == -100).all()


def test_prediction_modules_share_embedding_and_head():
    for tied in (True, False):
        model = random_model(tiny(mtp_depth=1, tie_embeddings=tied))
        names = [name for name, _ in model.mtp.named_parameters()]
        assert not any(n == "embedding" or n == "head" for name in names for n in name.split("."))
        batch = random_batch(13, [[6]], 6)
        (only,) = model(*arguments(batch)).mtp
        only.backward()
        assert model.embedding.grad.abs().max() > 0
        assert model.head_weight.grad.abs().max() > 0
        assert model.norm.weight.grad is None  # the main head's norm is not the module's


def test_without_its_loss_a_prediction_module_changes_no_gradient():
    # DeepSeek-V3: lambda = 0
    with_module, without = random_model(tiny(mtp_depth=1)), random_model(tiny(mtp_depth=0))
    without.load_state_dict({k: v for k, v in with_module.state_dict().items() if not k.startswith("mtp.")})
    batch = random_batch(13, ROWS, 6)
    sums = with_module(*arguments(batch))
    (sums.ce + 0.0 * sums.mtp[0]).backward()
    without(*arguments(batch)).ce.backward()
    for name, parameter in without.named_parameters():
        assert torch.equal(parameter.grad, dict(with_module.named_parameters())[name].grad), name
    assert all((p.grad == 0).all() for p in with_module.mtp.parameters() if p.grad is not None)


def test_a_prediction_module_does_not_see_further_than_its_token():
    # position i may use tokens up to i + depth
    model = random_model(tiny(mtp_depth=2))
    batch = random_batch(13, [[8]], 8)
    changed = batch.tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 13
    a = model.hidden(batch.tokens, batch.positions, batch.documents)
    b = model.hidden(changed, batch.positions, batch.documents)
    assert torch.equal(a.main[:, :5], b.main[:, :5])
    for depth, (one, two) in enumerate(zip(a.predicted, b.predicted, strict=True), start=1):
        assert torch.equal(one[:, : 5 - depth], two[:, : 5 - depth])
        assert not torch.equal(one[:, 5 - depth], two[:, 5 - depth])


def test_tied_and_untied_head():
    tied, untied = (random_model(tiny(tie_embeddings=tie)) for tie in (True, False))
    assert tied.head_weight is tied.embedding
    assert "head" not in dict(tied.named_parameters())
    state = tied.state_dict()
    untied.load_state_dict(state | {"head": state["embedding"]})
    batch = random_batch(13, ROWS, 6)
    for model in (tied, untied):
        model(*arguments(batch)).ce.backward()
    torch.testing.assert_close(
        tied.embedding.grad, untied.embedding.grad + untied.head.grad, atol=1e-12, rtol=0
    )


def test_layer_numbers_of_the_routing():
    model = random_model(tiny(num_layers=4, moe_layers="1,3", mtp_depth=2))
    batch = random_batch(13, ROWS, 6)
    sums = model(*arguments(batch))
    assert sorted(sums.routing) == [1, 3, 4, 5] == [index for index, _ in model.moe_layers()]
    for report in sums.routing.values():
        assert int(report.chosen.sum()) == 2 * 17


def decoded(model: Transformer, tokens: Tensor, cuts: list[int]) -> Tensor:
    """Logits after each piece, decoding in pieces."""
    cache = model.new_cache(tokens.shape[0], tokens.shape[1] + 3)
    start, out = 0, []
    for size in cuts:
        end = start + size
        mask = torch.full((tokens.shape[0], 1, size, end), float("-inf"), dtype=torch.float64).triu(start + 1)
        places = torch.arange(start, end).expand(tokens.shape[0], size)
        out.append(model.decode(tokens[:, start:end], places, mask, cache, start))
        start = end
    return torch.stack(out, dim=1)


@each_variant
@pytest.mark.parametrize("cuts", [[1] * 7, [7], [4, 1, 1, 1], [2, 3, 2]])
def test_decode_gives_the_logits_of_the_forward(changes, cuts):
    config = tiny(**changes)
    model = random_model(config)
    tokens = random_batch(config.vocab_size, [[7], [7]], 7).tokens
    with torch.no_grad():
        want = model.logits(tokens, torch.arange(7).expand(2, 7), torch.zeros_like(tokens))
        got = decoded(model, tokens, cuts)
    ends = torch.tensor(cuts).cumsum(0) - 1
    torch.testing.assert_close(got, want[:, ends], atol=1e-11, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"attention": "gqa"}])
def test_decode_in_bfloat16(changes):
    model = random_model(tiny(d_model=32, moe_layers="", **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.to(torch.bfloat16)
    tokens = random_batch(13, [[7], [7]], 7).tokens
    with torch.no_grad():
        want = model.logits(tokens, torch.arange(7).expand(2, 7), torch.zeros_like(tokens)).float()
        got = decoded(model, tokens, [4, 1, 1, 1])
    assert got.dtype == torch.bfloat16
    assert (got.float() - want[:, 3:]).norm() / want[:, 3:].norm() < 0.03


def test_cache_of_deepseek_v2():
    # 576 numbers per token and layer, where 128 heads of keys and values are 32,768
    with torch.device("meta"):
        model = Transformer(deepseek_v2())
    cache = model.new_cache(1, 1)
    assert sum(entries.numel() for entries in cache) == 34_560
    full = replace(deepseek_v2(), attention="gqa", num_kv_heads=128, head_dim=128)
    with torch.device("meta"):
        assert sum(entries.numel() for entries in Transformer(full).new_cache(1, 1)) == 1_966_080


def test_a_hundred_forwards_without_gradient_leave_nothing():
    # A13, B3
    model = random_model(tiny(mtp_depth=1))
    batch = random_batch(13, ROWS, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = {name: set(vars(module)) for name, module in model.named_modules()}
    losses = set()
    with torch.no_grad():
        for _ in range(100):
            losses.add(float(scalar(model(*arguments(batch)), model.config)))
    assert len(losses) == 1
    assert {name: set(vars(module)) for name, module in model.named_modules()} == kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("changes", [{}, {"attention": "gqa"}, {"mtp_depth": 1}])
def test_float32_is_close_to_float64(changes):
    config = tiny(**changes)
    exact = random_model(config)
    low = random_model(config, dtype=torch.float32)
    exact.load_state_dict({name: value.double() for name, value in low.state_dict().items()})
    batch = random_batch(13, ROWS, 6)
    ours, right = low(*arguments(batch)), exact(*arguments(batch))
    assert ours.ce.dtype == torch.float32
    assert ours.ce.item() == pytest.approx(right.ce.item(), rel=1e-5)
    ours.ce.backward(), right.ce.backward()
    for (name, p), q in zip(low.named_parameters(), exact.parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-4 * max(1.0, float(q.grad.norm())), name
