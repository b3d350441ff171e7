"""Named models: small ones to train on a CPU, and the published shapes of open models.

Every preset is a plain function; `PRESETS` gives it the name that `moesys train --preset` takes. The
published ones have the shapes that the authors released, and their papers' initialisation and YaRN scale.
"""

from __future__ import annotations

from collections.abc import Callable

from moesys.models.config import ModelConfig


def tiny_deepseek() -> ModelConfig:
    """The default: MLA, a dense layer, then MoE layers of 1 shared and 16 routed experts, top-4, sigmoid."""
    return ModelConfig()


def tiny_switch() -> ModelConfig:
    """Switch Transformer in small: one of 8 un-gated ReLU experts per token, in every second layer."""
    return ModelConfig(
        attention="gqa",
        activation="relu",
        moe_layers="1::2",
        num_experts=8,
        num_shared_experts=0,
        d_expert=768,
        top_k=1,
        router="softmax",
        normalize_weights=False,
    )


def tiny_mixtral() -> ModelConfig:
    """Mixtral in small: grouped-query attention and 8 experts, top-2, normalised softmax, in every layer."""
    return ModelConfig(
        attention="gqa",
        num_kv_heads=2,
        moe_layers="0:",
        num_experts=8,
        num_shared_experts=0,
        d_expert=256,
        top_k=2,
        router="softmax",
    )


def tiny_dense() -> ModelConfig:
    """tiny-deepseek without experts, its feed-forward sized to the same number of active parameters."""
    return ModelConfig(moe_layers="", d_ff=672)


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite, 15.7 B parameters, 2.4 B active (arXiv 2405.04434, appendix B)."""
    return ModelConfig(
        vocab_size=102_400,
        d_model=2048,
        num_layers=27,
        tie_embeddings=False,
        init_std=0.006,
        num_heads=16,
        num_kv_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn_factor=40.0,
        yarn_mscale=0.707,
        d_ff=10_944,
        num_experts=64,
        num_shared_experts=2,
        d_expert=1408,
        top_k=6,
        router="softmax",
        normalize_weights=False,
    )


def deepseek_v2() -> ModelConfig:
    """DeepSeek-V2, 236 B parameters, 21 B active: 6 of 160 experts, from 3 of 8 groups (arXiv 2405.04434)."""
    return ModelConfig(
        vocab_size=102_400,
        d_model=5120,
        num_layers=60,
        tie_embeddings=False,
        init_std=0.006,
        num_heads=128,
        num_kv_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn_factor=40.0,
        yarn_mscale=0.707,
        d_ff=12_288,
        num_experts=160,
        num_shared_experts=2,
        d_expert=1536,
        top_k=6,
        router="softmax",
        normalize_weights=False,
        route_scale=16.0,
        num_groups=8,
        top_groups=3,
        group_score="max",
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3, 671 B parameters, 37 B active; mtp_depth=1 adds its MTP module (arXiv 2412.19437)."""
    return ModelConfig(
        vocab_size=129_280,
        d_model=7168,
        num_layers=61,
        tie_embeddings=False,
        init_std=0.006,
        num_heads=128,
        num_kv_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn_factor=40.0,
        d_ff=18_432,
        moe_layers="3:",
        num_experts=256,
        num_shared_experts=1,
        d_expert=2048,
        top_k=8,
        route_scale=2.5,
        num_groups=8,
        top_groups=4,
    )


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B, 46.7 B parameters, 12.9 B active (arXiv 2401.04088)."""
    return ModelConfig(
        vocab_size=32_000,
        d_model=4096,
        num_layers=32,
        init_std=0.02,
        tie_embeddings=False,
        norm_eps=1e-5,
        attention="gqa",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        d_ff=14_336,
        moe_layers="0:",
        num_experts=8,
        num_shared_experts=0,
        d_expert=14_336,
        top_k=2,
        router="softmax",
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B, 30.5 B parameters, 3.3 B active (arXiv 2505.09388)."""
    return ModelConfig(
        vocab_size=151_936,
        d_model=2048,
        num_layers=48,
        init_std=0.02,
        tie_embeddings=False,
        attention="gqa",
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=True,
        rope_theta=1_000_000.0,
        d_ff=6144,
        moe_layers="0:",
        num_experts=128,
        num_shared_experts=0,
        d_expert=768,
        top_k=8,
        router="softmax",
    )


def olmoe_1b_7b() -> ModelConfig:
    """OLMoE-1B-7B, 6.9 B parameters, 1.3 B active (arXiv 2409.02060)."""
    return ModelConfig(
        vocab_size=50_304,
        d_model=2048,
        num_layers=16,
        init_std=0.02,
        tie_embeddings=False,
        norm_eps=1e-5,
        attention="gqa",
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        qk_norm_whole=True,
        d_ff=1024,
        moe_layers="0:",
        num_experts=64,
        num_shared_experts=0,
        d_expert=1024,
        top_k=8,
        router="softmax",
        normalize_weights=False,
    )


def switch_base_128() -> ModelConfig:
    """Switch-Base's width and 128 experts, top-1 in every second layer, decoder-only (arXiv 2101.03961)."""
    return ModelConfig(
        vocab_size=32_128,
        d_model=768,
        num_layers=12,
        tie_embeddings=True,
        init_std=0.02,
        attention="gqa",
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        activation="relu",
        d_ff=3072,
        moe_layers="1::2",
        num_experts=128,
        num_shared_experts=0,
        d_expert=3072,
        top_k=1,
        router="softmax",
        normalize_weights=False,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny-deepseek": tiny_deepseek,
    "tiny-switch": tiny_switch,
    "tiny-mixtral": tiny_mixtral,
    "tiny-dense": tiny_dense,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "olmoe-1b-7b": olmoe_1b_7b,
    "switch-base-128": switch_base_128,
}
