"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

B batch, S sequence, H heads, N width without position, R rotated width, C value width, L latent width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesys.models.attention import AttentionContext, attend
from moesys.models.config import ModelConfig
from moesys.models.layers import RMSNorm, linear
from moesys.models.rope import attention_scale, rotate


class MultiHeadLatentAttention(nn.Module):
    """Keys and values come from one narrow latent per token; one rotated key is shared by all heads.

    Training expands the latent to keys and values (`forward`). Decoding keeps the latent and the shared key only,
    L + R numbers per token, and multiplies the up-projections into the query and the output (`decode`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.nope, self.rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        self.scale = attention_scale(config, self.nope + self.rotated)
        width = config.num_heads * (self.nope + self.rotated)
        if config.q_lora_rank:
            self.q_down = linear(config.d_model, config.q_lora_rank)
            self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.q_up = linear(config.q_lora_rank, width)
        else:
            self.q = linear(config.d_model, width)
        self.kv_down = linear(config.d_model, self.latent + self.rotated)
        self.kv_norm = RMSNorm(self.latent, config.norm_eps)
        self.kv_up = linear(self.latent, config.num_heads * (self.nope + self.value))
        self.out = linear(config.num_heads * self.value, config.d_model)

    @property
    def cache_width(self) -> int:
        """Numbers that the cache holds per token: latent and shared rotated key."""
        return self.latent + self.rotated

    def queries(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """x [B, S, D] -> the part without position [B, S, H, N] and the rotated part [B, S, H, R]."""
        q = self.q_up(self.q_norm(self.q_down(x))) if hasattr(self, "q_up") else self.q(x)
        plain, turned = q.view(*x.shape[:2], self.num_heads, -1).split([self.nope, self.rotated], dim=-1)
        return plain, rotate(turned, context.cos, context.sin)

    def latents(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """x [B, S, D] -> normalised latent [B, S, L] and shared rotated key [B, S, 1, R]."""
        latent, key = self.kv_down(x).split([self.latent, self.rotated], dim=-1)
        return self.kv_norm(latent), rotate(key.unsqueeze(2), context.cos, context.sin)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        q = torch.cat(self.queries(x, context), dim=-1)
        latent, shared = self.latents(x, context)
        expanded = self.kv_up(latent).view(*x.shape[:2], self.num_heads, -1)
        plain, v = expanded.split([self.nope, self.value], dim=-1)
        k = torch.cat([plain, shared.expand(-1, -1, self.num_heads, -1)], dim=-1)
        return self.out(attend(q, k, v, context.mask, self.scale).flatten(2))

    def decode(self, x: Tensor, context: AttentionContext, cache: Tensor, start: int) -> Tensor:
        """Absorbed attention of new tokens over the cache, which gets the new tokens' entries in place.

        x [B, S, D], cache [B, M, L + R] filled up to `start`; context.mask [B, 1, S, start + S] additive.
        Softmax and sums run in float32 or better. -> [B, S, D].
        """
        end = start + x.shape[1]
        plain, turned = self.queries(x, context)
        latent, shared = self.latents(x, context)
        cache[:, start:end] = torch.cat([latent, shared.squeeze(2)], dim=-1)
        up = self.kv_up.weight.view(self.num_heads, self.nope + self.value, self.latent)
        key_up, value_up = up.split([self.nope, self.value], dim=1)
        q = torch.cat([torch.einsum("bshn,hnl->bshl", plain, key_up), turned], dim=-1)
        scores = torch.einsum("bshc,bmc->bhsm", q, cache[:, :end]) * self.scale
        assert context.mask is not None
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = (scores.to(wide) + context.mask).softmax(dim=-1).to(x.dtype)
        read = torch.einsum("bhsm,bml->bshl", probabilities, cache[:, :end, : self.latent])
        return self.out(torch.einsum("bshl,hvl->bshv", read, value_up).flatten(2))
