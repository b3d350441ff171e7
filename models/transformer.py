"""The decoder-only transformer. It knows no ranks: parallelism, recomputation and compilation act from outside.

B sequences, S positions, D width, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from moesys.kernels.cross_entropy import IGNORE, linear_cross_entropy
from moesys.models.attention import AttentionContext, packed_mask
from moesys.models.config import ModelConfig
from moesys.models.feed_forward import FeedForward
from moesys.models.gqa import GroupedQueryAttention
from moesys.models.layers import RMSNorm, linear
from moesys.models.mla import MultiHeadLatentAttention
from moesys.models.moe import MoE, RoutingMemory, RoutingReport
from moesys.models.rope import inverse_frequencies, rotation


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What the blocks compute, before the head."""

    main: Tensor
    """[B, S, D] after the final norm."""
    predicted: tuple[Tensor, ...]
    """Per multi-token-prediction depth, [B, S, D] after that module's norm."""
    routing: dict[int, RoutingReport]
    """By layer index; prediction module d stands at num_layers + d."""


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over this micro-batch; the caller divides by the numbers of the whole global batch."""

    ce: Tensor
    """Sum over labelled positions of the next-token cross-entropy in nats; float32, with gradient."""
    mtp: tuple[Tensor, ...]
    """Per prediction depth, the same sum for the token one further on; positions without one are left out."""
    routing: dict[int, RoutingReport]
    """By layer index."""


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm dense or Mixture-of-Experts feed-forward layer."""

    def __init__(self, config: ModelConfig, *, moe: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention: MultiHeadLatentAttention | GroupedQueryAttention
        if config.attention == "mla":
            self.attention = MultiHeadLatentAttention(config)
        else:
            self.attention = GroupedQueryAttention(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward: MoE | FeedForward
        if moe:
            self.feed_forward = MoE(config)
        else:
            self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        real: Tensor | None = None,
        memory: RoutingMemory | None = None,
    ) -> tuple[Tensor, RoutingReport | None]:
        """x [B, S, D], real [B, S] bool or None -> [B, S, D] and the routing report of a MoE block."""
        x = x + self.attention(self.attention_norm(x), context)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MoE):  # asked here, so that compiled graphs of the kinds stay apart
            out, report = self.feed_forward(normed, real, memory=memory)
            return x + out, report
        return x + self.feed_forward(normed), None

    def decode(self, x: Tensor, context: AttentionContext, cache: Tensor, start: int) -> Tensor:
        """As `forward`, for new tokens over a cache that is filled up to `start`."""
        x = x + self.attention.decode(self.attention_norm(x), context, cache, start)
        normed = self.feed_forward_norm(x)
        out = self.feed_forward(normed)
        return x + (out[0] if isinstance(self.feed_forward, MoE) else out)


class MultiTokenPrediction(nn.Module):
    """One prediction depth of DeepSeek-V3 (arXiv 2412.19437, section 2.2): mix the stream of the depth before
    with the embedding of the next known token, run one block, and leave the shared head to the model."""

    def __init__(self, config: ModelConfig, *, moe: bool) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.d_model, config.norm_eps)
        self.embedding_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mix = linear(2 * config.d_model, config.d_model)
        self.block = Block(config, moe=moe)
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def combined(self, stream: Tensor, embedded: Tensor) -> Tensor:
        """Both [B, S, D] -> the block's input [B, S, D]."""
        return self.mix(torch.cat([self.hidden_norm(stream), self.embedding_norm(embedded)], dim=-1))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head (its own or the embedding), multi-token-prediction modules.

    Building it leaves the values open: call `moesys.models.initialise.initialise` or load a checkpoint.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        moe_layers = config.moe_layer_indices
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.blocks = nn.ModuleList(Block(config, moe=i in moe_layers) for i in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tie_embeddings:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.mtp = nn.ModuleList(
            MultiTokenPrediction(config, moe=bool(moe_layers)) for _ in range(config.mtp_depth)
        )
        rotated = config.qk_rope_head_dim if config.attention == "mla" else config.head_dim
        self.frequencies = inverse_frequencies(config, rotated)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the output head."""
        return self.embedding if self.config.tie_embeddings else self.head

    def all_blocks(self) -> list[Block]:
        """The blocks in order, those of the prediction modules last."""
        return [
            cast(Block, block) for block in [*self.blocks, *(module.block for module in self._predictors())]
        ]

    def _predictors(self) -> list[MultiTokenPrediction]:
        return cast(list[MultiTokenPrediction], list(self.mtp))

    def moe_layers(self) -> Iterator[tuple[int, MoE]]:
        """Every MoE layer with its index, prediction modules last."""
        for index, block in enumerate(self.all_blocks()):
            if isinstance(block.feed_forward, MoE):
                yield index, block.feed_forward

    def context(self, positions: Tensor, mask: Tensor | None) -> AttentionContext:
        """Rotations of positions [B, S] with a mask, in the model's dtype."""
        cos, sin = rotation(positions, self.frequencies, self.embedding.dtype)
        return AttentionContext(cos=cos, sin=sin, mask=mask)

    def hidden(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Hidden:
        """Run all blocks. tokens, positions, documents [B, S] int64; documents -1 marks padding."""
        context = self.context(positions, packed_mask(documents, self.embedding.dtype))
        real = None if bool((documents >= 0).all()) else documents >= 0
        routing: dict[int, RoutingReport] = {}
        stream = nn.functional.embedding(tokens, self.embedding)
        for index, block in enumerate(self.blocks):
            stream, report = block(stream, context, real)
            if report is not None:
                routing[index] = report
        predicted = []
        main = self.norm(stream)
        for depth, module in enumerate(self._predictors(), start=1):
            same = shift(documents, depth, -1) == documents
            following = shift(tokens, depth, 0).masked_fill(~same, 0)  # nothing after its document
            embedded = nn.functional.embedding(following, self.embedding)
            stream, report = module.block(module.combined(stream, embedded), context, real)
            if report is not None:
                routing[self.config.num_layers + depth - 1] = report
            predicted.append(module.norm(stream))
        return Hidden(main=main, predicted=tuple(predicted), routing=routing)

    def forward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Tensor, chunk: int = 256
    ) -> LossSums:
        """Loss sums of one micro-batch. All arguments [B, S] int64; labels as in `moesys.data.Batch`."""
        hidden = self.hidden(tokens, positions, documents)
        targets = [prediction_targets(labels, documents, depth) for depth in range(len(self.mtp) + 1)]
        ce, *mtp = (
            linear_cross_entropy(state.flatten(0, 1), self.head_weight, target.flatten(), chunk)
            for state, target in zip((hidden.main, *hidden.predicted), targets, strict=True)
        )
        return LossSums(ce=ce, mtp=tuple(mtp), routing=hidden.routing)

    def logits(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """Whole logits [B, S, V], for small inputs; arguments [B, S] int64."""
        return self.hidden(tokens, positions, documents).main @ self.head_weight.t()

    def new_cache(self, batch: int, length: int) -> list[Tensor]:
        """An empty cache per block: latents (MLA) or keys and values (GQA) for `length` positions."""
        widths = [cast(Block, block).attention.cache_width for block in self.blocks]
        return [self.embedding.new_zeros(batch, length, width) for width in widths]

    def decode(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: list[Tensor], start: int
    ) -> Tensor:
        """Logits [B, V] after the last of the new tokens, whose entries are added to the cache in place.

        tokens, positions [B, S] int64; mask [B, 1, S, start + S] additive, in float32 or better.
        """
        context = self.context(positions, mask)
        stream = nn.functional.embedding(tokens, self.embedding)
        for block, entries in zip(self.blocks, cache, strict=True):
            stream = cast(Block, block).decode(stream, context, entries, start)
        return self.norm(stream[:, -1]) @ self.head_weight.t()


def prediction_targets(labels: Tensor, documents: Tensor, depth: int) -> Tensor:
    """Labels for prediction depth `depth` (0: the next token): the token `depth` further on inside the document.

    labels, documents [B, S] int64 -> [B, S] int64, IGNORE where the row or the document ends before.
    """
    if depth == 0:
        return labels
    same = shift(documents, depth, -1) == documents
    return shift(labels, depth, IGNORE).masked_fill(~same, IGNORE)


def shift(x: Tensor, by: int, fill: int) -> Tensor:
    """x [B, S] moved `by` positions to the left, the end filled."""
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out
