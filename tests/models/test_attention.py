from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesys.models.attention import AttentionContext, packed_mask
from moesys.models.config import ModelConfig
from moesys.models.gqa import GroupedQueryAttention
from moesys.models.mla import MultiHeadLatentAttention
from moesys.models.rope import inverse_frequencies, rotation
from moesys.testing import naive_model
from moesys.testing.tiny import randomise, tiny, weights_of

YARN = {"yarn_factor": 4.0, "yarn_original_length": 16, "yarn_mscale": 0.707}
VARIANTS = {
    "mla": {},
    "mla, low-rank queries": {"q_lora_rank": 3},
    "mla, values wider than keys": {"v_head_dim": 9},
    "mla, yarn": YARN,
    "mla, one head": {"num_heads": 1},
    "gqa": {"attention": "gqa"},
    "gqa, 4 heads on 2": {"attention": "gqa", "num_heads": 4, "num_kv_heads": 2},
    "gqa, as many keys": {"attention": "gqa", "num_kv_heads": 2},
    "gqa, norm by head": {"attention": "gqa", "qk_norm": True, "num_heads": 4, "num_kv_heads": 2},
    "gqa, whole norm": {"attention": "gqa", "qk_norm_whole": True, "num_heads": 4, "num_kv_heads": 2},
    "gqa, biases": {"attention": "gqa", "qkv_bias": True},
    "gqa, yarn": {"attention": "gqa", **YARN},
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())


def make(config: ModelConfig) -> MultiHeadLatentAttention | GroupedQueryAttention:
    module = MultiHeadLatentAttention(config) if config.attention == "mla" else GroupedQueryAttention(config)
    module.to(torch.float64)
    randomise(module)
    return module


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def context(config: ModelConfig, positions: Tensor, mask: Tensor | None) -> AttentionContext:
    rotated = config.qk_rope_head_dim if config.attention == "mla" else config.head_dim
    cos, sin = rotation(positions, inverse_frequencies(config, rotated), torch.float64)
    return AttentionContext(cos=cos, sin=sin, mask=mask)


def naive(config: ModelConfig, x: Tensor, positions: list[int], weights: dict[str, Tensor]) -> Tensor:
    return (naive_model.mla if config.attention == "mla" else naive_model.gqa)(x, positions, weights, config)


@each_variant
def test_against_every_head_and_position(changes):
    config = tiny(**changes)
    module = make(config)
    weights = weights_of(module)
    x = draw(2, 5, 8).requires_grad_()
    y = x.detach().clone().requires_grad_()
    places = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    out = module(x, context(config, places, None))
    want = torch.stack([naive(config, y[row], places[row].tolist(), weights) for row in range(2)])
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
    pull = draw(2, 5, 8, seed=1)
    out.backward(pull), want.backward(pull)
    torch.testing.assert_close(x.grad, y.grad, atol=1e-11, rtol=0)
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().max() > 0 or name == "k.bias", name
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, atol=1e-11, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@each_variant
def test_packed_documents_equal_documents_alone(changes):
    config = tiny(**changes)
    module = make(config)
    x = draw(2, 6, 8).requires_grad_()
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 2, 2]])
    places = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1]])
    out = module(x, context(config, places, packed_mask(documents, torch.float64)))
    pull = draw(2, 6, 8, seed=1)
    pull[documents == -1] = 0
    together = torch.autograd.grad((out * pull).sum(), [x, *module.parameters()])
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for document in range(int(documents[row].max()) + 1):
            own = documents[row] == document
            alone = module(x[row : row + 1, own], context(config, places[row : row + 1, own], None))
            torch.testing.assert_close(out[row, own], alone[0], atol=1e-13, rtol=0)
            total = total + (alone[0] * pull[row, own]).sum()
    apart = torch.autograd.grad(total, [x, *module.parameters()])
    for left, right in zip(together, apart, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=0)
    assert torch.isfinite(out).all()


def test_mask():
    documents = torch.tensor([[0, 0, 1, -1, -1]])
    mask = packed_mask(documents, torch.float32)
    assert mask.shape == (1, 1, 5, 5)
    seen = [[j for j in range(5) if mask[0, 0, i, j] == 0] for i in range(5)]
    assert seen == [[0], [0, 1], [2], [3], [3, 4]]
    assert set(mask.flatten().tolist()) == {0.0, float("-inf")}


@pytest.mark.parametrize("documents", [[[0, 0, 0]], [[0, 0, 0], [3, 3, 3]], [[-1, -1, -1], [0, 0, 0]]])
def test_one_document_needs_no_mask(documents):
    assert packed_mask(torch.tensor(documents), torch.float32) is None


@each_variant
def test_the_future_is_not_seen(changes):
    config = tiny(**changes)
    module = make(config)
    places = torch.arange(5).unsqueeze(0)
    x = draw(1, 5, 8)
    changed = x.clone()
    changed[:, 3:] += 1
    a, b = (module(value, context(config, places, None)) for value in (x, changed))
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.equal(a[:, 3:], b[:, 3:])


@each_variant
@pytest.mark.parametrize("cuts", [[1] * 6, [6], [4, 1, 1], [2, 3, 1]])
def test_decode_equals_forward(changes, cuts):
    config = tiny(**changes)
    module = make(config)
    x, places = draw(2, 6, 8), torch.arange(6).expand(2, 6)
    want = module(x, context(config, places, None))
    cache = torch.full((2, 9, module.cache_width), float("nan"), dtype=torch.float64)
    start, parts = 0, []
    for size in cuts:
        end = start + size
        mask = torch.full((2, 1, size, end), float("-inf"), dtype=torch.float64).triu(start + 1)
        part = context(config, places[:, start:end], mask)
        parts.append(module.decode(x[:, start:end], part, cache, start))
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=1e-12, rtol=0)
    assert torch.isfinite(cache[:, :6]).all()
    assert torch.isnan(cache[:, 6:]).all()


@each_variant
def test_decode_of_prompts_of_different_lengths(changes):
    # padding stands on the left and is masked; positions count from the first real token
    config = tiny(**changes)
    module = make(config)
    x = draw(2, 5, 8)
    padding = [0, 2]
    places = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    mask = torch.full((2, 1, 5, 5), float("-inf"), dtype=torch.float64).triu(1)
    mask[1, :, 2:, :2] = float("-inf")
    cache = torch.zeros(2, 5, module.cache_width, dtype=torch.float64)
    got = module.decode(x, context(config, places, mask), cache, 0)
    for row, skipped in enumerate(padding):
        own = places[row : row + 1, skipped:]
        want = module(x[row : row + 1, skipped:], context(config, own, None))
        torch.testing.assert_close(got[row, skipped:], want[0], atol=1e-12, rtol=0)


def test_cache_widths():
    assert make(tiny()).cache_width == 5 + 4
    assert make(tiny(attention="gqa", num_heads=4, num_kv_heads=2)).cache_width == 2 * 2 * 6


@each_variant
def test_bfloat16_is_close(changes):
    config = tiny(d_model=32, kv_lora_rank=16, **changes)
    module = make(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.4).copy_(parameter.to(torch.bfloat16))
    x = draw(2, 8, 32).to(torch.bfloat16)
    places = torch.arange(8).expand(2, 8)
    want = module(x.double(), context(config, places, None))
    module.to(torch.bfloat16)
    got = module(x, context(config, places, None))
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() / want.norm() < 2e-2
