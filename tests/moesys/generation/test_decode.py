"""Decoding over the cache against the plain forward, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
import pytest
import torch

from moesys.generation import decode
from moesys.generation.decode import Decoder, generate
from moesys.generation.sampling import Sampling
from moesys.models.config import ModelConfig
from moesys.models.initialise import build
from moesys.models.transformer import Transformer

END = 0
MLA = ModelConfig(
    vocab_size=40,
    d_model=24,
    num_layers=3,
    num_heads=3,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    d_ff=32,
    num_experts=6,
    top_k=2,
    d_expert=12,
    init_std=0.3,
)
SHAPES = {
    "mla": MLA,
    "mla with compressed queries": replace(MLA, q_lora_rank=8),
    "mla with yarn": replace(MLA, yarn_factor=4.0, yarn_original_length=8),
    "gqa": replace(MLA, attention="gqa", num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True),
    "softmax router, untied": replace(MLA, router="softmax", tie_embeddings=False),
    "dense": replace(MLA, moe_layers=""),
    "with prediction modules": replace(MLA, mtp_depth=1),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [], [13, 14, 15]]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> Transformer:
    return build(SHAPES[request.param], 3, torch.float64, "cpu")


@pytest.fixture(scope="module")
def mla() -> Transformer:
    return build(MLA, 3, torch.float64, "cpu")


@torch.no_grad()
def plain_logits(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    """[S, V] by the forward that training uses, on one document."""
    row = torch.tensor([list(tokens)])
    return model.logits(row, torch.arange(len(tokens)).unsqueeze(0), torch.zeros_like(row))[0]


def continued(model: Transformer, prompts, sampling=GREEDY, count=12, vocab_size=40) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in prompts]
    for prompt, token in generate(
        model,
        prompts,
        end_of_text=END,
        vocab_size=vocab_size,
        max_new_tokens=count,
        sampling=sampling,
    ):
        out[prompt].append(token)
    return out


def test_decode_gives_the_logits_of_the_forward(model: Transformer) -> None:
    """Any cut of the tokens into feeds, rows padded to the longest."""
    lengths = [9, 4, 1]
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 40, (n,), generator=generator).tolist() for n in lengths]
    padding = [9 - n for n in lengths]
    tokens = torch.tensor([[END] * pad + row for pad, row in zip(padding, rows, strict=True)])
    for cuts in ([9], [1] * 9, [3, 5, 1]):
        decoder = Decoder(model, padding, 9)
        end = 0
        for part in tokens.split(cuts, dim=1):
            found = decoder.feed(part)
            end += part.shape[1]
            for i, row in enumerate(rows):
                real = end - padding[i]
                if real > 0:
                    expected = plain_logits(model, row[:real])[-1]
                    torch.testing.assert_close(found[i], expected, rtol=1e-11, atol=1e-11)


def test_greedy_is_the_plain_loop(model: Transformer) -> None:
    found = continued(model, PROMPTS)
    for prompt, new in zip(PROMPTS, found, strict=True):
        tokens = [END, *prompt]
        for token in new:
            logits = plain_logits(model, tokens)[-1]
            assert token == int(logits.argmax())
            tokens.append(token)
        assert len(new) == 12 or new[-1] == END


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, top_p=0.95, seed=4)])
def test_a_batch_gives_what_each_prompt_gives_alone(model: Transformer, sampling: Sampling) -> None:
    together = continued(model, PROMPTS, sampling, count=16)
    assert together == [continued(model, [prompt], sampling, count=16)[0] for prompt in PROMPTS]
    turned = continued(model, PROMPTS[::-1], sampling, count=16)
    assert together == turned[::-1]


def test_rows_that_end_early_leave_the_others_as_they_are(mla: Transformer) -> None:
    sampling = Sampling(temperature=1.0, seed=2)
    prompts = [[n] for n in range(1, 15)]
    together = continued(mla, prompts, sampling, count=40)
    lengths = {len(tokens) for tokens in together}
    assert len(lengths) > 3, "the test needs rows that end at different steps"
    for prompt, tokens in zip(prompts, together, strict=True):
        assert END not in tokens[:-1]
        assert tokens[-1] == END or len(tokens) == 40
        assert tokens == continued(mla, [prompt], sampling, count=40)[0]


def test_a_long_prompt_goes_through_in_pieces(mla: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1 + n % 39 for n in range(23)], [3]]
    whole = continued(mla, prompts)
    monkeypatch.setattr(decode, "PREFILL", 4)
    assert continued(mla, prompts) == whole


def test_padding_content_does_not_matter(mla: Transformer) -> None:
    results = []
    for filler in (0, 17):
        decoder = Decoder(mla, [3, 0], 5)
        results.append(decoder.feed(torch.tensor([[filler] * 3 + [4, 5], [1, 2, 3, 4, 5]])))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-13)


def test_seeds(mla: Transformer) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return continued(mla, [[5], [5]], Sampling(temperature=1.0, seed=seed))

    first, second = drawn(0)
    assert [first, second] == drawn(0)
    assert first != second, "the same prompt given twice draws twice"
    assert drawn(1) != [first, second]


def test_tokens_stay_inside_the_tokenizer(mla: Transformer) -> None:
    for tokens in continued(mla, PROMPTS, Sampling(temperature=100.0), vocab_size=7, count=40):
        assert max(tokens) < 7


def test_the_cache_holds_the_prompt_and_the_new_tokens(mla: Transformer, monkeypatch) -> None:
    sizes = []
    original = Transformer.new_cache

    def spy(self: Transformer, batch: int, length: int) -> list[torch.Tensor]:
        if batch:
            sizes.append((batch, length))
        return original(self, batch, length)

    monkeypatch.setattr(Transformer, "new_cache", spy)
    continued(mla, [[1, 2, 3], [4]], count=5)
    # end-of-text, three tokens, five new ones of which the last is not fed
    assert sizes == [(2, 8)]


def test_a_cache_beyond_the_memory_is_refused_before_it_is_made(mla: Transformer) -> None:
    free = psutil.virtual_memory().available
    with pytest.raises(ValueError, match=r"takes .* GB, .* GB are free; lower --max-new-tokens"):
        continued(mla, [[1]], count=free)


def test_logits_that_are_not_finite_are_told() -> None:
    broken = build(MLA, 3, torch.float32, "cpu")
    broken.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"not finite.*--checkpoint"):
        continued(broken, [[1]])


def test_no_prompts(mla: Transformer) -> None:
    assert continued(mla, []) == []


def test_gradients_are_left_as_they_were(mla: Transformer) -> None:
    stream = generate(mla, [[1]], end_of_text=END, vocab_size=40, max_new_tokens=3, sampling=GREEDY)
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
