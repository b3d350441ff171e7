from __future__ import annotations

import math

import pytest
import torch

from moesys.models.presets import deepseek_v2, deepseek_v2_lite, deepseek_v3
from moesys.models.rope import attention_scale, inverse_frequencies, rotate, rotation
from moesys.testing import naive_model
from moesys.testing.tiny import tiny


def test_plain_frequencies_by_hand():
    got = inverse_frequencies(tiny(rope_theta=10_000.0), 8)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])


def test_yarn_by_hand():
    # R = 8, base 10000, L = 1000, 4x; turns within L of pair i: 1000 * 10^-i / 2 pi = 159.2, 15.92, 1.592, 0.159
    # dim(n) = 8 ln(1000 / 2 pi n) / (2 ln 10000): dim(32) = 0.697 -> low 0; dim(1) = 2.202 -> high 3
    config = tiny(rope_theta=10_000.0, yarn_factor=4.0, yarn_original_length=1000)
    ramp = [0, 1 / 3, 2 / 3, 1]
    want = [f * (r / 4 + 1 - r) for f, r in zip([1, 0.1, 0.01, 0.001], ramp, strict=True)]
    assert inverse_frequencies(config, 8).tolist() == pytest.approx(want, rel=1e-12)


def test_yarn_of_deepseek_v2():
    # R = 64, base 10000, L = 4096, s = 40: low = floor(10.5) and high = ceil(22.5), as the released code has them
    config = deepseek_v2()
    got = inverse_frequencies(config, 64)
    plain = 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    low, high = 10, 23
    assert torch.equal(got[: low + 1], plain[: low + 1])
    torch.testing.assert_close(got[high:], plain[high:] / 40, atol=0, rtol=1e-15)
    middle = (16 - low) / (high - low)
    assert got[16].item() == pytest.approx(0.01 * (middle / 40 + 1 - middle), rel=1e-12)
    assert (got[1:] < got[:-1]).all()


@pytest.mark.parametrize("rotated", [4, 6, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"yarn_factor": 40.0},
        {"yarn_factor": 2.0, "yarn_original_length": 64, "rope_theta": 100.0},
        {"yarn_factor": 8.0, "yarn_original_length": 32, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5},
        {"yarn_factor": 8.0, "yarn_original_length": 3},
    ],
)
def test_frequencies_against_the_formula(rotated, changes):
    config = tiny(**({"rope_theta": 10_000.0} | changes))
    want = [naive_model.frequency(config, rotated, pair) for pair in range(rotated // 2)]
    assert inverse_frequencies(config, rotated).tolist() == pytest.approx(want, rel=1e-14)


def test_attention_scale():
    assert attention_scale(tiny(), 16) == 0.25
    lite, full, third = deepseek_v2_lite(), deepseek_v2(), deepseek_v3()
    for config in (lite, full):  # sqrt(t) = 0.0707 ln s + 1 in the paper of V2
        want = (0.0707 * math.log(40) + 1) ** 2 / math.sqrt(192)
        assert attention_scale(config, 192) == pytest.approx(want, rel=1e-12)
    assert attention_scale(third, 192) == pytest.approx(
        (0.1 * math.log(40) + 1) ** 2 / math.sqrt(192), rel=1e-12
    )


def test_rotation_by_hand():
    config = tiny(rope_theta=10_000.0)
    cos, sin = rotation(torch.tensor([[0, 3]]), inverse_frequencies(config, 4), torch.float64)
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    got = rotate(x, cos, sin)
    assert got[0, 0, 0].tolist() == [1, 2, 3, 4]
    c, s, c2, s2 = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    want = [c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]
    assert got[0, 1, 0].tolist() == pytest.approx(want, rel=1e-14)


def test_products_depend_on_the_distance_only():
    frequencies = inverse_frequencies(tiny(), 6)
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 6, generator=g, dtype=torch.float64) for _ in range(2))

    def product(i: int, j: int) -> float:
        turned = [
            rotate(x, *rotation(torch.tensor([[p]]), frequencies, torch.float64)) for x, p in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 4) == pytest.approx(product(103, 100), rel=1e-12)
    assert product(7, 4) != pytest.approx(product(7, 5), rel=1e-3)


def test_gradient_and_norm():
    cos, sin = rotation(torch.tensor([[2, 5]]), inverse_frequencies(tiny(), 4), torch.float64)
    x = torch.randn(
        1, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))


def test_far_positions_lose_nothing_in_float32():
    # angles in float32 would be off by 2^-7 at position 131,071
    cos, _ = rotation(torch.tensor([[131_071]]), inverse_frequencies(tiny(), 4), torch.float32)
    assert cos.dtype == torch.float32
    assert cos[0, 0, 0, 0].item() == pytest.approx(math.cos(131_071), abs=1e-6)


def test_bfloat16_rounds_once():
    cos, sin = rotation(torch.tensor([[3]]), inverse_frequencies(tiny(), 4), torch.bfloat16)
    x = torch.randn(1, 1, 2, 4).to(torch.bfloat16)
    got, want = rotate(x, cos, sin), rotate(x.double(), cos.double(), sin.double())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=2**-8)
