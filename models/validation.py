"""The rules that the numbers of a model keep among each other."""

from __future__ import annotations

from moesys.models.config import ModelConfig, parse_layers
from moesys.models.fields import Findings


def model_problems(config: ModelConfig) -> list[str]:
    """Every contradiction in a model's configuration; empty when it can be built.

    Each message names the fields with their values, the rule that they break, and a way out.
    """
    return model_findings(config).problems


def model_findings(config: ModelConfig, prefix: str = "") -> Findings:
    """`model_problems` with the fields of each; prefix is put before every field's name."""
    findings = Findings(config, prefix)
    if findings.well_typed():  # the rules below compare numbers
        _check_trunk(findings, config)
        if config.attention == "mla":
            _check_mla(findings, config)
        else:
            _check_gqa(findings, config)
        _check_rope(findings, config)
        _check_layers(findings, config)
    return findings


def _check_trunk(findings: Findings, config: ModelConfig) -> None:
    findings.at_least(1, "vocab_size d_model num_layers num_heads")
    findings.above_zero("norm_eps init_std")
    findings.not_negative("mtp_depth")


def _check_mla(findings: Findings, config: ModelConfig) -> None:
    findings.at_least(1, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
    findings.not_negative("q_lora_rank")
    findings.require(
        config.qk_rope_head_dim % 2 == 0,
        "qk_rope_head_dim",
        "RoPE rotates pairs of elements, so this must be even",
        f"set it to {config.qk_rope_head_dim + 1}",
    )
    for name in ("qk_norm", "qk_norm_whole", "qkv_bias"):
        findings.require(
            not getattr(config, name),
            f"attention {name}",
            "this option exists in grouped-query attention only",
            f'set {name} = false or attention = "gqa"',
        )


def _check_gqa(findings: Findings, config: ModelConfig) -> None:
    positive = findings.at_least(1, "num_kv_heads head_dim")
    if positive and config.num_heads >= 1:
        most = min(config.num_kv_heads, config.num_heads)
        nearest = next(heads for heads in range(most, 0, -1) if config.num_heads % heads == 0)
        findings.require(
            config.num_heads % config.num_kv_heads == 0,
            "num_heads num_kv_heads",
            "the key/value heads must divide the query heads",
            f"set num_kv_heads to {nearest}",
        )
    findings.require(
        config.head_dim % 2 == 0,
        "head_dim",
        "RoPE rotates pairs of elements, so this must be even",
        f"set it to {config.head_dim + 1}",
    )
    findings.require(
        not (config.qk_norm and config.qk_norm_whole),
        "qk_norm qk_norm_whole",
        "queries and keys are normalised by head or whole, not both",
        "turn one of them off",
    )


def _check_rope(findings: Findings, config: ModelConfig) -> None:
    findings.require(
        config.rope_theta > 1,
        "rope_theta",
        "the base of the frequencies must be above 1",
        "the usual value is 10000",
    )
    findings.require(
        config.yarn_factor >= 1,
        "yarn_factor",
        "YaRN lengthens the context, so this must be at least 1",
        "set it to 1 to turn YaRN off",
    )
    findings.at_least(1, "yarn_original_length")
    findings.above_zero("yarn_beta_slow")
    findings.require(
        config.yarn_beta_fast > config.yarn_beta_slow,
        "yarn_beta_fast yarn_beta_slow",
        "beta_fast must be above beta_slow",
        "the usual values are 32 and 1",
    )
    findings.not_negative("yarn_mscale")


def _check_layers(findings: Findings, config: ModelConfig) -> None:
    if config.num_layers < 1:
        return
    layers: set[int] = set()
    for piece in filter(None, (part.strip() for part in config.moe_layers.split(","))):
        try:
            chosen = parse_layers(piece, config.num_layers)
        except ValueError:
            chosen = ()
        layers.update(chosen)
        findings.require(
            len(chosen) > 0,
            "moe_layers num_layers",
            f"{piece!r} names none of the layers 0 to {config.num_layers - 1}",
            'write slices and indices such as "1:", "1::2" or "0,3", or "" for a dense model',
        )
    if len(layers) < config.num_layers:
        findings.at_least(1, "d_ff")
    if layers:
        _check_experts(findings, config)
        _check_weights(findings, config)


def _check_experts(findings: Findings, config: ModelConfig) -> None:
    findings.not_negative("num_shared_experts")
    findings.at_least(1, "d_expert top_k")
    findings.require(
        not (config.shared_gate and config.num_shared_experts == 0),
        "shared_gate num_shared_experts",
        "there is no shared expert to gate",
        "set shared_gate = false or num_shared_experts = 1",
    )
    enough = findings.require(
        config.num_experts >= 1,
        "moe_layers num_experts",
        "a Mixture-of-Experts layer needs at least one expert",
        'raise num_experts, or set moe_layers = "" for a dense model',
    )
    if enough and findings.at_least(1, "num_groups top_groups"):
        _check_groups(findings, config)


def _check_groups(findings: Findings, config: ModelConfig) -> None:
    if not findings.require(
        config.num_experts % config.num_groups == 0,
        "num_experts num_groups",
        "the groups must divide the experts evenly",
        "choose num_groups so that num_experts is a multiple of it; 1 turns groups off",
    ):
        return
    group_size = config.num_experts // config.num_groups
    findings.require(
        config.top_groups <= config.num_groups,
        "top_groups num_groups",
        "a token cannot use more groups than there are",
        f"set top_groups to {config.num_groups} or less",
    )
    reachable = min(config.top_groups, config.num_groups) * group_size
    findings.require(
        config.top_k <= reachable,
        "top_k num_experts" + (" num_groups top_groups" if config.num_groups > 1 else ""),
        f"a token can reach only {reachable} experts",
        f"set top_k to {reachable} or less, or raise num_experts"
        + (" or top_groups" if config.num_groups > 1 else ""),
    )
    findings.require(
        config.num_groups == 1 or config.group_score == "max" or group_size >= 2,
        "group_score num_experts num_groups",
        "the sum of a group's two best needs at least 2 experts in each group",
        'set group_score = "max" or fewer groups',
    )


def _check_weights(findings: Findings, config: ModelConfig) -> None:
    findings.above_zero("route_scale")
    findings.require(
        not (config.normalize_weights and config.top_k == 1 and config.num_experts > 1),
        "top_k normalize_weights",
        "one score divided by itself is always 1, so the language-model loss gives the router no gradient",
        "set normalize_weights = false or top_k to 2 or more",
    )
