"""The families of the benchmark: the same model on both sides, of the size that the benchmark promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesys.benchmarks.contender import Contender, draw_tokens, imbalance, time_step
from moesys.benchmarks.families import FAMILIES
from moesys.benchmarks.flops import step_flops
from moesys.benchmarks.moesys_model import moesys_contender
from moesys.benchmarks.transformers_models import Implementation, transformers_contender
from moesys.models.config import ModelConfig
from moesys.models.count import count_parameters

TINY = {"vocab_size": 96, "d_model": 32, "num_layers": 3, "num_heads": 4, "d_expert": 16}
TINY_MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}


def tiny(family: str) -> ModelConfig:
    config = replace(FAMILIES[family](), **TINY)
    return replace(config, d_ff=40, **TINY_MLA) if config.attention == "mla" else replace(config, head_dim=8)


def both(family: str) -> tuple[Contender, Contender]:
    config, eager = tiny(family), Implementation(experts="eager", attention="eager")
    theirs = transformers_contender(config, family=family, sequence=16, chosen=eager, seed=0)
    return moesys_contender(config, seed=0), theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_config_is_sound_and_of_the_promised_size(family):
    config = FAMILIES[family]()
    assert config.problems() == []
    assert 11e6 <= count_parameters(config).total <= 14e6
    assert config.vocab_size == 4096


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_have_the_same_parameters(family):
    ours, theirs = both(family)
    assert ours.num_parameters() == theirs.num_parameters() == count_parameters(tiny(family)).total

    # Our side may stack or split matrices otherwise than theirs, but norms are vectors on both.
    def vectors(side: Contender) -> list[int]:
        return sorted(each.numel() for each in side.model.parameters() if each.dim() == 1)

    assert vectors(ours) == vectors(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_trains_every_parameter_and_starts_at_chance(family):
    tokens = draw_tokens(96, 2, 16, seed=1)
    for side in both(family):
        before = [each.detach().clone() for each in side.model.parameters()]
        seconds, loss = time_step(side, side.optimizer(), tokens)
        assert seconds > 0
        assert loss == pytest.approx(math.log(96), rel=0.02)
        for old, (name, new) in zip(before, side.model.named_parameters(), strict=True):
            assert not torch.equal(old, new), f"{side.name}: {name} did not move"


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_mean_over_every_token_but_the_first(family):
    """Over 2, 3 and 16 tokens of one causal sequence: what each further token adds is a cross-entropy near chance."""
    tokens = draw_tokens(96, 1, 16, seed=2)
    for side in both(family):
        with torch.no_grad():
            parts = [float(side.loss(tokens[:, :length])) * (length - 1) for length in (2, 3, 16)]
        assert parts[0] == pytest.approx(math.log(96), rel=0.1), side.name
        assert parts[1] - parts[0] == pytest.approx(math.log(96), rel=0.1), side.name
        assert parts[2] == pytest.approx(15 * math.log(96), rel=0.1), side.name


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_count_every_choice_of_every_token(family):
    config, tokens = tiny(family), draw_tokens(96, 2, 16, seed=3)
    for side in both(family):
        loads = side.loads(tokens)
        assert loads.shape == (len(config.moe_layer_indices), config.num_experts)
        assert (loads.sum(dim=1) == tokens.numel() * config.top_k).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_agree_with_those_that_pytorch_counts(family):
    """The oracle counts the products that the eager model of transformers really makes, forward and backward.

    Its attention also multiplies with the keys that the mask hides: S * S pairs in place of S * (S + 1) / 2.
    """
    config, (_, theirs) = tiny(family), both(family)
    batch, sequence = 2, 16
    tokens = draw_tokens(96, batch, sequence, seed=4)
    with FlopCounterMode(display=False) as counter:
        theirs.loss(tokens).backward()
    widths = 18 + 4 if config.attention == "mla" else 16  # 8 + 4 of a key and 10 of a value; 8 and 8
    hidden_pairs = batch * sequence * (sequence - 1) // 2
    hidden = 3 * 2 * hidden_pairs * widths * config.num_heads * config.num_layers
    assert step_flops(config, batch, sequence) == counter.get_total_flops() - hidden


def test_tokens_depend_on_the_seed_alone():
    first = draw_tokens(50, 3, 7, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, draw_tokens(50, 3, 7, seed=5))
    assert not torch.equal(first, draw_tokens(50, 3, 7, seed=6))
    assert first.shape == (3, 7) and first.dtype == torch.int64
    assert int(first.min()) >= 0 and int(draw_tokens(50, 100, 100, seed=5).max()) == 49


def test_imbalance_is_the_mean_over_layers_of_fullest_over_mean():
    assert imbalance(torch.tensor([[4, 0], [2, 2]])) == pytest.approx(1.5)
