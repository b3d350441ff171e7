"""A naive transformer and a naive training step: every head, position and document by itself, in float64.

Written from the papers and the docstrings, without the code under test. Weights come as a mapping with the names
of `Transformer.state_dict`. Documents are run apart from each other and padding is left out altogether, so that
packing and masking are tested by comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesys.config import BalanceConfig, OptimizerConfig
from moesys.models.config import ModelConfig
from moesys.testing.oracles import (
    TokenRouting,
    cross_entropy_sum,
    feed_forward,
    load_balance,
    load_counts,
    moe_token,
    rms_norm,
    z_loss_sum,
)

Weights = Mapping[str, Tensor]


def part(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Those under a prefix, without it."""
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def frequency(config: ModelConfig, rotated: int, pair: int) -> float:
    """Angle per position of one rotated pair, under YaRN (DeepSeek-V2, section 3.1.4) where it is on."""
    base, factor = config.rope_theta, config.yarn_factor
    plain = base ** (-2 * pair / rotated)
    if factor == 1.0:
        return plain

    def dim(turns: float) -> float:
        return rotated * math.log(config.yarn_original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = math.floor(dim(config.yarn_beta_fast)), math.ceil(dim(config.yarn_beta_slow))
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
    return plain / factor * ramp + plain * (1 - ramp)


def turn(vector: Tensor, position: int, config: ModelConfig) -> Tensor:
    """Rotate a [R] head: element i with element i + R/2."""
    half = len(vector) // 2
    first, second = [], []
    for i in range(half):
        angle = position * frequency(config, len(vector), i)
        a, b = vector[i], vector[i + half]
        first.append(a * math.cos(angle) - b * math.sin(angle))
        second.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.stack(first + second)


def softmax_scale(config: ModelConfig, width: int) -> float:
    """1/sqrt(width), times mscale^2 under YaRN."""
    if config.yarn_factor == 1.0:
        return 1 / math.sqrt(width)
    return (0.1 * config.yarn_mscale * math.log(config.yarn_factor) + 1) ** 2 / math.sqrt(width)


def read(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
    """Softmax attention of one query over some keys."""
    scores = [(query * key).sum() * scale for key in keys]
    exps = [torch.exp(s) for s in scores]
    total = sum(exps, torch.zeros_like(exps[0]))
    return sum((e / total * v for e, v in zip(exps, values, strict=True)), torch.zeros_like(values[0]))


def mla(x: Tensor, positions: Sequence[int], w: Weights, config: ModelConfig) -> Tensor:
    """DeepSeek-V2, equations 9 to 19, on one document x [S, D]."""
    heads, nope, rot = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    queries, keys, values = [], [], []
    for token, position in zip(x.unbind(0), positions, strict=True):
        if config.q_lora_rank:
            compressed = rms_norm(w["q_down.weight"] @ token, w["q_norm.weight"], config.norm_eps)
            q = w["q_up.weight"] @ compressed
        else:
            q = w["q.weight"] @ token
        down = w["kv_down.weight"] @ token
        latent = rms_norm(down[: config.kv_lora_rank], w["kv_norm.weight"], config.norm_eps)
        shared = turn(down[config.kv_lora_rank :], position, config)
        up = (w["kv_up.weight"] @ latent).reshape(heads, nope + config.v_head_dim)
        q = q.reshape(heads, nope + rot)
        queries.append([torch.cat([q[h, :nope], turn(q[h, nope:], position, config)]) for h in range(heads)])
        keys.append([torch.cat([up[h, :nope], shared]) for h in range(heads)])
        values.append([up[h, nope:] for h in range(heads)])
    return _attended(queries, keys, values, w, softmax_scale(config, nope + rot), [*range(heads)])


def gqa(x: Tensor, positions: Sequence[int], w: Weights, config: ModelConfig) -> Tensor:
    """Grouped-query attention on one document x [S, D]: query head h reads key head h * G // H."""
    heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
    queries, keys, values = [], [], []
    for token, position in zip(x.unbind(0), positions, strict=True):
        q, k, v = (w[f"{n}.weight"] @ token + w.get(f"{n}.bias", torch.zeros(())) for n in "qkv")
        if config.qk_norm_whole:
            q = rms_norm(q, w["q_norm.weight"], config.norm_eps)
            k = rms_norm(k, w["k_norm.weight"], config.norm_eps)
        q, k, v = q.reshape(heads, width), k.reshape(groups, width), v.reshape(groups, width)
        if config.qk_norm:
            q = torch.stack([rms_norm(row, w["q_norm.weight"], config.norm_eps) for row in q])
            k = torch.stack([rms_norm(row, w["k_norm.weight"], config.norm_eps) for row in k])
        queries.append([turn(row, position, config) for row in q])
        keys.append([turn(row, position, config) for row in k])
        values.append(list(v))
    owner = [h * groups // heads for h in range(heads)]
    return _attended(queries, keys, values, w, softmax_scale(config, width), owner)


def _attended(
    queries: list[list[Tensor]],
    keys: list[list[Tensor]],
    values: list[list[Tensor]],
    w: Weights,
    scale: float,
    owner: list[int],
) -> Tensor:
    """Causal attention by position and head; head h reads keys and values of owner[h]."""
    rows = []
    for i, heads in enumerate(queries):
        out = [
            read(q, [keys[j][g] for j in range(i + 1)], [values[j][g] for j in range(i + 1)], scale)
            for q, g in zip(heads, owner, strict=True)
        ]
        rows.append(w["out.weight"] @ torch.cat(out))
    return torch.stack(rows)


@dataclass(kw_only=True)
class NaiveSums:
    """What a batch leaves behind, per layer the routing of each row's real tokens."""

    ce: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    labels: int = 0
    mtp: list[Tensor]
    predicted: list[int]
    rows: dict[int, list[list[TokenRouting]]] = field(default_factory=dict)


def block(
    x: Tensor, positions: Sequence[int], w: Weights, config: ModelConfig
) -> tuple[Tensor, list[TokenRouting]]:
    """One block on one document x [S, D]."""
    attention = mla if config.attention == "mla" else gqa
    normed = rms_norm(x, w["attention_norm.weight"], config.norm_eps)
    x = x + attention(normed, positions, part(w, "attention."), config)
    inner = part(w, "feed_forward.")
    routings, rows = [], []
    for token in rms_norm(x, w["feed_forward_norm.weight"], config.norm_eps).unbind(0):
        if "router.weight" in inner:
            out, routing = moe_token(token, inner, config)
            routings.append(routing)
        else:
            out = feed_forward(token, inner["w13.weight"], inner["w2.weight"], config.activation)
        rows.append(out)
    return x + torch.stack(rows), routings


def run(
    config: ModelConfig, w: Weights, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Tensor
) -> NaiveSums:
    """The whole model on a batch; all tensors [B, S] as in `moesys.data.Batch`."""
    depth = config.mtp_depth
    zero = torch.zeros((), dtype=torch.float64)
    sums = NaiveSums(mtp=[zero] * depth, predicted=[0] * depth)
    for row in range(tokens.shape[0]):
        layers: dict[int, list[TokenRouting]] = {}
        for document in sorted(set(documents[row].tolist()) - {-1}):
            where = [i for i, d in enumerate(documents[row].tolist()) if d == document]
            _run_document(config, w, tokens[row], labels[row], positions[row], where, sums, layers)
        for layer, routings in layers.items():
            sums.rows.setdefault(layer, []).append(routings)
    return sums


def _run_document(
    config: ModelConfig,
    w: Weights,
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor,
    where: list[int],
    sums: NaiveSums,
    layers: dict[int, list[TokenRouting]],
) -> None:
    head = w["embedding"] if config.tie_embeddings else w["head"]
    places = [int(positions[i]) for i in where]
    x = torch.stack([w["embedding"][int(tokens[i])] for i in where])
    for index in range(config.num_layers):
        x, routings = block(x, places, part(w, f"blocks.{index}."), config)
        if routings:
            layers.setdefault(index, []).extend(routings)
    targets = [int(labels[i]) for i in where]
    sums.ce = sums.ce + cross_entropy_sum(rms_norm(x, w["norm.weight"], config.norm_eps), head, targets)
    sums.labels += sum(t != -100 for t in targets)
    for k in range(1, config.mtp_depth + 1):
        own = part(w, f"mtp.{k - 1}.")
        mixed = []
        for i, stream in zip(where, x.unbind(0), strict=True):
            following = int(tokens[i + k]) if i + k <= where[-1] else 0
            halves = [
                rms_norm(stream, own["hidden_norm.weight"], config.norm_eps),
                rms_norm(w["embedding"][following], own["embedding_norm.weight"], config.norm_eps),
            ]
            mixed.append(own["mix.weight"] @ torch.cat(halves))
        x, routings = block(torch.stack(mixed), places, part(own, "block."), config)
        if routings:
            layers.setdefault(config.num_layers + k - 1, []).extend(routings)
        further = targets[k:] + [-100] * min(k, len(targets))
        out = rms_norm(x, own["norm.weight"], config.norm_eps)
        sums.mtp[k - 1] = sums.mtp[k - 1] + cross_entropy_sum(out, head, further)
        sums.predicted[k - 1] += sum(t != -100 for t in further)


@dataclass(frozen=True, kw_only=True)
class NaiveTerms:
    """The loss of a global batch and its parts."""

    total: Tensor
    ce: float
    mtp: float
    load_balance: float
    z: float
    counts: dict[int, list[int]]


def loss(
    config: ModelConfig,
    w: Weights,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    balance: BalanceConfig,
    mtp_weight: float,
) -> NaiveTerms:
    """Loss of a whole global batch (tokens, labels, positions, documents)."""
    sums = run(config, w, *batch)
    zero = torch.zeros((), dtype=torch.float64)
    ce = sums.ce / sums.labels
    mtp = sum((s / n for s, n in zip(sums.mtp, sums.predicted, strict=True)), zero) / max(config.mtp_depth, 1)
    even, z = zero, zero
    counts = {}
    for layer, rows in sorted(sums.rows.items()):
        everything = [token for row in rows for token in row]
        counts[layer] = load_counts(everything, config.num_experts)
        if balance.loss_scope == "sequence":
            even = even + sum((load_balance(row, config) for row in rows), zero) / len(rows)
        else:
            even = even + load_balance(everything, config)
        z = z + z_loss_sum(everything) / len(everything)
    num = max(len(sums.rows), 1)
    return NaiveTerms(
        total=ce + mtp_weight * mtp + balance.loss_coef * even + balance.z_loss_coef * z,
        ce=ce.item(),
        mtp=mtp.item(),
        load_balance=even.item() / num,
        z=z.item() / num,
        counts=counts,
    )


@dataclass(frozen=True, kw_only=True)
class NaiveAdamW:
    """Where AdamW has come to."""

    values: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    norms: list[float]
    """Of each step's gradients, before clipping."""


def adamw(
    start: dict[str, Tensor],
    gradients: Sequence[dict[str, Tensor]],
    config: OptimizerConfig,
    rates: Sequence[float],
) -> NaiveAdamW:
    """One AdamW step (Loshchilov and Hutter) per dictionary of gradients, with global clipping.

    Weight decay acts on matrices that are no norm, bias, embedding, head or router.
    """
    values = dict(start)
    first = {name: torch.zeros_like(v) for name, v in start.items()}
    second = {name: torch.zeros_like(v) for name, v in start.items()}
    norms = []
    b1, b2 = config.betas
    for t, (step, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norms.append(math.sqrt(sum(float((g * g).sum()) for g in step.values())))
        factor = min(1.0, config.clip / (norms[-1] + 1e-6)) if config.clip else 1.0
        for name, g in step.items():
            first[name] = b1 * first[name] + (1 - b1) * g * factor
            second[name] = b2 * second[name] + (1 - b2) * (g * factor) ** 2
            spared = "norm" in name or "bias" in name or "router" in name or name in ("embedding", "head")
            shrunk = values[name] * (1 - (0.0 if spared else rate * config.weight_decay))
            root = torch.sqrt(second[name] / (1 - b2**t)) + config.eps
            values[name] = shrunk - rate * first[name] / (1 - b1**t) / root
    return NaiveAdamW(values=values, first=first, second=second, norms=norms)
