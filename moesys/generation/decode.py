"""Autoregressive decoding of several prompts at once over the model's cache.

B rows, S new tokens, L tokens in the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import Tensor

from moesys.generation.sampling import Sampling, draw_keys, sample, uniform
from moesys.models.transformer import Transformer

PREFILL = 256
"""Prompt tokens that go through the model at a time, which bounds the memory of the attention scores."""


class Decoder:
    """Rows of different lengths in one cache, padded on the left so that they all end at the same place.

    What a row sees is its own tokens only: padding is masked, and positions count from the row's first token.
    """

    def __init__(self, model: Transformer, padding: Sequence[int], length: int) -> None:
        """padding: the number of padding tokens before each of the B rows; length: tokens that the cache holds.

        Raises ValueError where the cache does not fit the free memory.
        """
        self.model = model
        device = model.embedding.device
        _check_memory(model, len(padding), length)
        self.padding = torch.tensor(padding, device=device).unsqueeze(1)
        with torch.inference_mode():
            self.cache = model.new_cache(len(padding), length)
        self.filled = 0

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens [B, S] int64 to the rows -> logits [B, V] of the token after the last."""
        end = self.filled + tokens.shape[1]
        columns = torch.arange(end, device=tokens.device)
        queries = columns[self.filled :]
        real = columns >= self.padding
        allowed = real.unsqueeze(1) & (columns <= queries.unsqueeze(1))
        # A padding token sees itself, so that no row of the softmax is empty.
        allowed |= columns == queries.unsqueeze(1)
        dtype = torch.promote_types(self.model.embedding.dtype, torch.float32)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=tokens.device)
        mask = mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)
        positions = (queries - self.padding).clamp(min=0)
        logits = self.model.decode(tokens, positions, mask, self.cache, self.filled)
        self.filled = end
        return logits

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with the rows of these indices only."""
        chosen = torch.tensor(rows, device=self.padding.device)
        self.padding = self.padding[chosen]
        for layer in range(len(self.cache)):
            self.cache[layer] = self.cache[layer][chosen]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    end_of_text: int,
    vocab_size: int,
    max_new_tokens: int,
    sampling: Sampling,
) -> Iterator[tuple[int, int]]:
    """Continue prompts (token ids, possibly none); yields (index of the prompt, token) as they are drawn.

    A prompt starts a document, after an end-of-text as in training. It ends with the first end-of-text drawn,
    which is yielded too, or after max_new_tokens. Tokens are below vocab_size, the entries of the tokenizer, which
    the model may have more than. Every prompt is continued as it would be alone, up to the rounding of the
    model's dtype. Raises ValueError for a cache that does not fit the memory and for logits that are not finite.
    """
    if not prompts:
        return
    documents = [[end_of_text, *prompt] for prompt in prompts]
    longest = max(map(len, documents))
    padding = [longest - len(document) for document in documents]
    # The last token drawn is not fed again.
    decoder = Decoder(model, padding, longest + max_new_tokens - 1)
    device = model.embedding.device
    rows = [[end_of_text] * pad + document for pad, document in zip(padding, documents, strict=True)]
    for chunk in torch.tensor(rows, device=device).split(PREFILL, dim=1):
        logits = decoder.feed(chunk)
    keys = draw_keys(prompts, sampling.seed)
    active = list(range(len(prompts)))
    for new in range(max_new_tokens):
        _check_finite(logits)
        uniforms = [uniform(keys[index], len(documents[index]) + new) for index in active]
        drawn = sample(logits[:, :vocab_size], sampling, uniforms).tolist()
        yield from zip(active, drawn, strict=True)
        going = [row for row, token in enumerate(drawn) if token != end_of_text]
        if not going or new == max_new_tokens - 1:
            return
        if len(going) < len(active):
            decoder.keep(going)
            active = [active[row] for row in going]
        logits = decoder.feed(torch.tensor([[drawn[row]] for row in going], device=device))


def _check_memory(model: Transformer, rows: int, length: int) -> None:
    per_token = sum(entries.shape[-1] for entries in model.new_cache(0, 1)) * model.embedding.itemsize
    needed = rows * length * per_token
    device = model.embedding.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"the cache for {rows} prompt(s) of up to {length:,} tokens takes {needed / 1e9:,.1f} GB, "
            f"{free / 1e9:,.1f} GB are free; lower --max-new-tokens, or give fewer or shorter prompts"
        )


def _check_finite(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise ValueError(
            "the model's logits are not finite: this checkpoint is of a run that diverged; try an earlier one "
            "with --checkpoint STEP"
        )
