"""The other side of the training-step benchmark: the same architectures as `transformers` implements them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesys.benchmarks.contender import Contender, time_step
from moesys.models.config import ModelConfig

EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """How `transformers` computes the experts and the attention of a model."""

    experts: str = "grouped_mm"
    attention: str = "sdpa"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one implementation reached in the search for the best: tokens of a step, tokens per second."""

    experts: str
    attention: str
    tokens: int
    tokens_per_second: float


def transformers_contender(
    config: ModelConfig, *, family: str, sequence: int, chosen: Implementation, seed: int
) -> Contender:
    """The model of `config` as `transformers` builds and initialises it, after `torch.manual_seed(seed)`.

    `family` is "deepseek-v3", "mixtral" or "qwen3-moe"; `sequence` the longest sequence in tokens. The loss
    is what a user gets by passing `labels`, which the model shifts itself.
    """
    import transformers

    torch.manual_seed(seed)
    class_name, convert = _FAMILIES[family]
    # A cache of keys and values, on by default, would only cost time and memory in training.
    model = getattr(transformers, class_name)(convert(config, sequence)).train()
    model.config.use_cache = False
    use_implementation(model, chosen)

    def loads(tokens: Tensor) -> Tensor:
        return _router_loads(model, tokens, config.num_experts)

    return Contender(
        name="transformers",
        model=model,
        loss=lambda tokens: model(input_ids=tokens, labels=tokens).loss,
        loads=loads,
    )


def use_implementation(model: Any, chosen: Implementation) -> None:
    """Let a `transformers` model compute its experts and its attention in the chosen way."""
    model.set_experts_implementation(chosen.experts)
    model.set_attn_implementation(chosen.attention)


def find_best(contender: Contender, tokens: Tensor, repeats: int = 3) -> tuple[Implementation, list[Trial]]:
    """The implementation with the fastest training step on `tokens` [B, S], and every trial on the way.

    Each way to compute the experts is first tried on one short sequence, and goes no further when it takes
    more than three times as long as the fastest: batched_mm copies an expert's weights for every token of it,
    tens of gigabytes for a whole batch. The others are timed on the whole batch, with each attention.
    """
    heats = [Implementation(experts=experts) for experts in EXPERTS_IMPLEMENTATIONS]
    trials = _time_each(contender, heats, tokens[:1, :128], repeats)
    enough = max(trial.tokens_per_second for trial in trials) / 3
    finals = [
        Implementation(experts=trial.experts, attention=attention)
        for trial in trials
        if trial.tokens_per_second >= enough
        for attention in ATTENTION_IMPLEMENTATIONS
    ]
    last = _time_each(contender, finals, tokens, repeats)
    best = max(last, key=lambda trial: trial.tokens_per_second)
    return Implementation(experts=best.experts, attention=best.attention), trials + last


def _time_each(
    contender: Contender, candidates: list[Implementation], tokens: Tensor, repeats: int
) -> list[Trial]:
    """Let the candidates take turns, `repeats` each after one that does not count; the fastest step stands."""
    optimizer = contender.optimizer()
    seconds: list[list[float]] = [[] for _ in candidates]
    for turn in range(1 + repeats):
        for candidate, times in zip(candidates, seconds, strict=True):
            use_implementation(contender.model, candidate)
            elapsed, _ = time_step(contender, optimizer, tokens)
            if turn:
                times.append(elapsed)
    return [
        Trial(
            experts=candidate.experts,
            attention=candidate.attention,
            tokens=tokens.numel(),
            tokens_per_second=tokens.numel() / min(times),
        )
        for candidate, times in zip(candidates, seconds, strict=True)
    ]


def _router_loads(model: Any, tokens: Tensor, num_experts: int) -> Tensor:
    """Tokens that every expert gets in a forward of `tokens`: int64 [MoE layers, experts]."""
    counts: list[Tensor] = []

    def record(_module: Any, _inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        counts.append(torch.bincount(outputs[2].flatten(), minlength=num_experts))

    # Every MoE block of the three families keeps its router as `gate`; it returns (logits, weights, experts).
    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        with torch.no_grad():
            model(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(counts)


def _deepseek_v3(config: ModelConfig, sequence: int) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_common(config, sequence),
        intermediate_size=config.d_ff,
        moe_intermediate_size=config.d_expert,
        first_k_dense_replace=config.num_layers - len(config.moe_layer_indices),
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        n_routed_experts=config.num_experts,
        n_shared_experts=config.num_shared_experts,
        n_group=config.num_groups,
        topk_group=config.top_groups,
        norm_topk_prob=config.normalize_weights,
        routed_scaling_factor=config.route_scale,
    )


def _mixtral(config: ModelConfig, sequence: int) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_common(config, sequence),
        intermediate_size=config.d_expert,
        **_grouped_query(config),
        num_local_experts=config.num_experts,
    )


def _qwen3_moe(config: ModelConfig, sequence: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_common(config, sequence),
        moe_intermediate_size=config.d_expert,
        **_grouped_query(config),
        num_experts=config.num_experts,
        norm_topk_prob=config.normalize_weights,
    )


def _grouped_query(config: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}


def _common(config: ModelConfig, sequence: int) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.top_k,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": sequence,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


_FAMILIES: dict[str, tuple[str, Callable[[ModelConfig, int], Any]]] = {
    "deepseek-v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
}
