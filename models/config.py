"""The shape of a model: every number that decides its parameters and its function, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["swiglu", "geglu", "gelu", "relu"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, dense or with Mixture-of-Experts layers. Widths are in elements."""

    vocab_size: int = 4096
    """Rows of the embedding. A tokenizer trained on the spot gets this many entries."""
    d_model: int = 256
    """Width of the residual stream."""
    num_layers: int = 5
    """Transformer blocks, multi-token-prediction modules not counted."""
    tie_embeddings: bool = False
    """Use the embedding as the output head."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    init_std: float = 0.03
    """Standard deviation of weight matrices at the start; those that write into the residual stream have it divided
    by sqrt(2 * num_layers)."""

    attention: Literal["mla", "gqa"] = "mla"
    """Multi-head latent attention (DeepSeek-V2) or grouped-query attention."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 4
    """Key/value heads of grouped-query attention; divides num_heads. MLA ignores it."""
    head_dim: int = 64
    """Width of a head in grouped-query attention. MLA ignores it."""
    qk_norm: bool = False
    """Grouped-query attention: RMSNorm on every query and key head before RoPE (Qwen3)."""
    qk_norm_whole: bool = False
    """Grouped-query attention: one RMSNorm over all query (key) heads together (OLMoE)."""
    qkv_bias: bool = False
    """Grouped-query attention: biases on the query, key and value projections (Qwen2)."""
    q_lora_rank: int = 0
    """MLA: rank of the query compression; 0 projects queries directly."""
    kv_lora_rank: int = 128
    """MLA: width of the latent that the cache holds."""
    qk_nope_head_dim: int = 32
    """MLA: width of a query/key head without position."""
    qk_rope_head_dim: int = 32
    """MLA: width of the rotated part of a query head, and of the one shared key."""
    v_head_dim: int = 64
    """MLA: width of a value head."""

    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    yarn_factor: float = 1.0
    """YaRN: how many times longer than yarn_original_length the context may be; 1 turns YaRN off."""
    yarn_original_length: int = 4096
    """YaRN: context length of the training before the extension."""
    yarn_beta_fast: float = 32.0
    """YaRN: rotations within the original length above which a frequency stays as it is."""
    yarn_beta_slow: float = 1.0
    """YaRN: rotations below which a frequency is interpolated fully."""
    yarn_mscale: float = 1.0
    """YaRN: m in the attention-scale factor (0.1 m ln s + 1)^2; 0.707 in DeepSeek-V2-Lite."""

    activation: Activation = "swiglu"
    """Feed-forward and expert activation; swiglu and geglu are gated, gelu and relu are not."""
    d_ff: int = 768
    """Inner width of a dense feed-forward layer."""

    moe_layers: str = "1:"
    """Which blocks are MoE: Python slices and indices, comma-separated ("1:", "1::2", "0,3,5"); "" is dense."""
    num_experts: int = 16
    """Routed experts per MoE layer."""
    num_shared_experts: int = 1
    """Experts that every token passes; fused into one of num_shared_experts * d_expert width."""
    shared_gate: bool = False
    """Scale the shared experts by a sigmoid gate per token (Qwen2-MoE)."""
    d_expert: int = 128
    """Inner width of one expert."""
    top_k: int = 4
    """Routed experts per token."""
    router: Literal["softmax", "sigmoid"] = "sigmoid"
    """Score function over the experts."""
    normalize_weights: bool = True
    """Divide the chosen scores by their sum (norm_topk_prob)."""
    route_scale: float = 1.0
    """Factor on the combine weights (routed_scaling_factor; 2.5 in DeepSeek-V3)."""
    num_groups: int = 1
    """Expert groups for group-limited routing; 1 turns it off."""
    top_groups: int = 1
    """Groups that one token may use."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its largest (DeepSeek-V2) or the sum of its two largest (DeepSeek-V3)."""

    mtp_depth: int = 0
    """Multi-token-prediction modules (DeepSeek-V3); 0 for none. They are not used in generation."""

    @property
    def moe_layer_indices(self) -> tuple[int, ...]:
        """Sorted indices of the MoE blocks that `moe_layers` names."""
        return parse_layers(self.moe_layers, self.num_layers)

    def problems(self) -> list[str]:
        """Every contradiction in this configuration, each with the rule, the value and a way out."""
        from moesys.models.validation import model_problems

        return model_problems(self)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Indices named by comma-separated Python indices and slices: `parse_layers("0,2::2", 6) == (0, 2, 4)`.

    Raises ValueError for text that is neither, or an index outside the model.
    """
    chosen: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            numbers = [int(number) if number.strip() else None for number in part.split(":")]
            picked = range(num_layers)[slice(*numbers)] if ":" in part else (range(num_layers)[numbers[0]],)  # type: ignore[index]
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(
                f"moe_layers: {part!r} in {text!r} is not an index or a slice of {num_layers} layers; "
                'write for instance "1:", "1::2" or "0,3"'
            ) from error
        chosen.update(picked)
    return tuple(sorted(chosen))
