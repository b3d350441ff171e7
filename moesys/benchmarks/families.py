"""The three model families that the training-step benchmark compares, at a size for two CPU cores."""

from __future__ import annotations

from collections.abc import Callable

from moesys.models.config import ModelConfig


def deepseek_v3_like() -> ModelConfig:
    """DeepSeek-V3 (arXiv 2412.19437) shrunk: MLA, one dense block, a shared expert, sigmoid, groups."""
    return ModelConfig(
        vocab_size=4096,
        d_model=256,
        num_layers=6,
        tie_embeddings=False,
        attention="mla",
        num_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        d_ff=768,
        moe_layers="1:",
        num_experts=16,
        num_shared_experts=1,
        d_expert=128,
        top_k=4,
        router="sigmoid",
        normalize_weights=True,
        route_scale=2.5,
        num_groups=4,
        top_groups=2,
        group_score="top2",
    )


def mixtral_like() -> ModelConfig:
    """Mixtral 8x7B (arXiv 2401.04088) shrunk: grouped-query attention, 8 wide experts in every block."""
    return ModelConfig(
        vocab_size=4096,
        d_model=256,
        num_layers=6,
        tie_embeddings=False,
        norm_eps=1e-5,
        attention="gqa",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        moe_layers=":",
        num_experts=8,
        num_shared_experts=0,
        d_expert=256,
        top_k=2,
        router="softmax",
        normalize_weights=True,
    )


def qwen3_moe_like() -> ModelConfig:
    """Qwen3-30B-A3B (arXiv 2505.09388) shrunk: query/key norms, many narrow experts in every block."""
    return ModelConfig(
        vocab_size=4096,
        d_model=256,
        num_layers=6,
        tie_embeddings=False,
        attention="gqa",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        rope_theta=1e6,
        moe_layers=":",
        num_experts=32,
        num_shared_experts=0,
        d_expert=64,
        top_k=4,
        router="softmax",
        normalize_weights=True,
    )


FAMILIES: dict[str, Callable[[], ModelConfig]] = {
    "deepseek-v3": deepseek_v3_like,
    "mixtral": mixtral_like,
    "qwen3-moe": qwen3_moe_like,
}
