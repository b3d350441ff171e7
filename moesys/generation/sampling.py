"""Drawing the next token. Every draw is a function of what it is for, so batches and repeats change nothing.

B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from the logits."""

    temperature: float = 0.8
    """Logits are divided by it; 0 takes the most likely token (greedy)."""
    top_k: int | None = None
    """Draw among this many of the most likely tokens; None among all."""
    top_p: float = 1.0
    """Draw among the fewest of the most likely tokens that together have this probability (nucleus sampling,
    Holtzman et al. 2020); it is taken after temperature and top_k."""
    seed: int = 0
    """Key of the draws."""

    def problems(self) -> list[str]:
        """Every value out of range, each with the rule, the value and a way out."""
        found = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(
                f"--temperature is a number from 0 up; {self.temperature} came: 0 takes the most likely token, "
                "1 draws as the model predicts"
            )
        if self.top_k is not None and self.top_k < 1:
            found.append(f"--top-k is at least 1; {self.top_k} came: leave it out to draw among all tokens")
        if not 0 < self.top_p <= 1:
            found.append(
                f"--top-p is above 0 and at most 1; {self.top_p} came: leave it out to draw among all tokens"
            )
        return found


def sample(logits: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> Tensor:
    """Draw a token for each row: the inverse of the cumulated probabilities, most likely first, at the uniform.

    logits [B, V] finite; uniforms, B numbers in [0, 1) -> [B] int64. Equal logits rank by lower id. Computed in
    float64.
    """
    ranked, ids = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    if sampling.temperature == 0:
        return ids[:, 0]
    ranked = ranked[:, : sampling.top_k]
    # The largest is subtracted first, so that a temperature near 0 gives 0 / T and -inf, never inf - inf.
    probabilities = ((ranked - ranked[:, :1]) / sampling.temperature).softmax(dim=-1)
    cumulated = probabilities.cumsum(dim=-1)
    inside = cumulated - probabilities < sampling.top_p  # what stands before each; true for the first
    number = inside.sum(dim=-1, keepdim=True)
    whole = cumulated.gather(1, number - 1)
    point = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(1) * whole
    place = torch.searchsorted(cumulated, point, right=True)
    return ids.gather(1, torch.minimum(place, number - 1)).squeeze(1)


def draw_keys(prompts: Sequence[Sequence[int]], seed: int) -> list[bytes]:
    """A key per prompt from the seed, its token ids, and how many equal prompts stand before it.

    So a prompt draws the same alone and in any batch, and one that is given twice draws differently each time.
    """
    seen: dict[tuple[int, ...], int] = {}
    keys = []
    for prompt in map(tuple, prompts):
        copy = seen[prompt] = seen.get(prompt, -1) + 1
        keys.append(blake2b(repr((seed, copy, prompt)).encode(), digest_size=16, person=b"prompt").digest())
    return keys


def uniform(key: bytes, position: int) -> float:
    """A number in [0, 1) for the token at a position of its document, keyed by both."""
    digest = blake2b(str(position).encode(), key=key, digest_size=8, person=b"draw").digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
