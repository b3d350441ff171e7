"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245). B batch, S sequence, H heads, G key heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesys.models.attention import AttentionContext, attend
from moesys.models.config import ModelConfig
from moesys.models.layers import RMSNorm, linear
from moesys.models.rope import attention_scale, rotate


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = attention_scale(config, config.head_dim)
        self.per_head_norm = config.qk_norm
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = linear(config.d_model, query, bias=config.qkv_bias)
        self.k = linear(config.d_model, key, bias=config.qkv_bias)
        self.v = linear(config.d_model, key, bias=config.qkv_bias)
        self.out = linear(query, config.d_model)
        if config.qk_norm or config.qk_norm_whole:
            self.q_norm = RMSNorm(config.head_dim if config.qk_norm else query, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim if config.qk_norm else key, config.norm_eps)

    @property
    def cache_width(self) -> int:
        """Numbers that the cache holds per token: all keys and values."""
        return 2 * self.num_kv_heads * self.head_dim

    def heads(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> rotated q [B, S, H, A], rotated k [B, S, G, A], v [B, S, G, A]."""
        q, k = self.q(x), self.k(x)
        shape = (*x.shape[:2], -1, self.head_dim)
        normed = hasattr(self, "q_norm")
        if normed and not self.per_head_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.view(shape), k.view(shape)
        if normed and self.per_head_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        return q, k, self.v(x).view(shape)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        q, k, v = self.heads(x, context)
        return self.out(attend(q, k, v, context.mask, self.scale).flatten(2))

    def decode(self, x: Tensor, context: AttentionContext, cache: Tensor, start: int) -> Tensor:
        """Attention of new tokens over the cache, which gets their keys and values in place.

        x [B, S, D], cache [B, M, 2 G A] filled up to `start`; context.mask [B, 1, S, start + S] additive.
        """
        end = start + x.shape[1]
        q, k, v = self.heads(x, context)
        cache[:, start:end] = torch.cat([k.flatten(2), v.flatten(2)], dim=-1)
        keys, values = (
            part.unflatten(-1, (self.num_kv_heads, self.head_dim)) for part in cache[:, :end].chunk(2, dim=-1)
        )
        assert context.mask is not None
        mask = context.mask.to(x.dtype)
        return self.out(attend(q, keys, values, mask, self.scale).flatten(2))
