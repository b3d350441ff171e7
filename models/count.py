"""How many parameters a model has, counted from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from moesys.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a model, in elements. A router's selection bias is a buffer and is not among them."""

    total: int
    """All parameters; a tied embedding once."""
    active: int
    """Those that take part for one token: total less the routed experts that the token does not choose."""
    by_part: dict[str, int]
    """total split into embedding, head (0 when tied), attention, feed_forward (dense layers), router,
    experts (routed), shared_experts (with their gate), norms (of the residual stream), mtp (all of it)."""


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Total and active parameters of a model.

    Reports differ in whether the active ones include the input embedding, which is a look-up and no product:
    Mixtral, Qwen3 and OLMoE count it, DeepSeek does not. It is counted here; by_part["embedding"] is that.
    """
    d = config.d_model
    num_moe = len(config.moe_layer_indices)
    moe, dense = _moe_layer(config), {"feed_forward": _feed_forward(config, config.d_ff)}
    by_part = {
        "embedding": config.vocab_size * d,
        "head": 0 if config.tie_embeddings else config.vocab_size * d,
        "attention": config.num_layers * _attention(config),
        "feed_forward": (config.num_layers - num_moe) * dense["feed_forward"],
        **{part: num_moe * size for part, size in moe.items()},
        "norms": (2 * config.num_layers + 1) * d,
    }
    # per module: two norms, a projection of both halves, a block (MoE if the model has any), a final norm
    block = moe if num_moe else dense
    by_part["mtp"] = config.mtp_depth * (2 * d * d + 5 * d + _attention(config) + sum(block.values()))
    total = sum(by_part.values())
    routed_layers = num_moe + (config.mtp_depth if num_moe else 0)
    one_expert = _feed_forward(config, config.d_expert)
    idle = routed_layers * (config.num_experts - config.top_k) * one_expert
    return ParameterCount(total=total, active=total - idle, by_part=by_part)


def _attention(config: ModelConfig) -> int:
    d, heads = config.d_model, config.num_heads
    if config.attention == "mla":
        query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        rank = config.q_lora_rank
        queries = d * rank + rank + rank * query_width if rank else d * query_width
        latent = d * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
        keys_values = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        return queries + latent + keys_values + heads * config.v_head_dim * d
    q, kv = heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * config.head_dim * config.qk_norm + (q + kv) * config.qk_norm_whole
    return d * (q + 2 * kv) + q * d + norms + (q + 2 * kv) * config.qkv_bias


def _feed_forward(config: ModelConfig, width: int) -> int:
    matrices = 3 if config.activation in ("swiglu", "geglu") else 2
    return matrices * config.d_model * width


def _moe_layer(config: ModelConfig) -> dict[str, int]:
    gate = config.d_model * config.shared_gate
    return {
        "router": config.num_experts * config.d_model,
        "experts": config.num_experts * _feed_forward(config, config.d_expert),
        "shared_experts": _feed_forward(config, config.num_shared_experts * config.d_expert) + gate,
    }
