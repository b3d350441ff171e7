"""Floating-point operations of a training step, counted from the shape of the model.

Per token, every weight that a matrix product uses costs 2 in the forward and 4 in the backward. Causal
attention multiplies each query with the keys and values up to its own place, at 2 per element in the
forward and 4 in the backward. Softmax, norms, activations, the embedding lookup and the optimiser are not
counted, and nothing is counted twice because an implementation computes it twice.
"""

from __future__ import annotations

from moesys.models.config import ModelConfig


def step_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """FLOPs of one forward and backward over `batch` sequences of `sequence` tokens, without MTP modules."""
    pairs = sequence * (sequence + 1) // 2  # (query, key) pairs with the key not after the query
    attention = 3 * 2 * config.num_layers * config.num_heads * _head_widths(config) * pairs
    return batch * (6 * active_matmul_parameters(config) * sequence + attention)


def active_matmul_parameters(config: ModelConfig) -> int:
    """Weights that multiply one token: not norms, biases, the embedding, or experts it does not visit."""
    matrices = 3 if config.activation in ("swiglu", "geglu") else 2
    experts = config.top_k + config.num_shared_experts
    router = config.d_model * (config.num_experts + (1 if config.shared_gate else 0))
    moe = matrices * config.d_model * config.d_expert * experts + router
    dense = matrices * config.d_model * config.d_ff
    num_moe = len(config.moe_layer_indices)
    feed_forward = num_moe * moe + (config.num_layers - num_moe) * dense
    head = config.vocab_size * config.d_model
    return config.num_layers * _attention_parameters(config) + feed_forward + head


def _attention_parameters(config: ModelConfig) -> int:
    d_model, heads = config.d_model, config.num_heads
    if config.attention == "gqa":
        return d_model * config.head_dim * 2 * (heads + config.num_kv_heads)
    query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    rank = config.q_lora_rank
    query = rank * (d_model + query_width) if rank else d_model * query_width
    latent = d_model * (config.kv_lora_rank + config.qk_rope_head_dim)
    expand = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return query + latent + expand + heads * config.v_head_dim * d_model


def _head_widths(config: ModelConfig) -> int:
    """Width of a query/key head plus width of a value head."""
    if config.attention == "gqa":
        return 2 * config.head_dim
    return config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
