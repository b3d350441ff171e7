"""What both kinds of attention share: the context of a forward pass, the mask, and the product itself.

B batch, S queries, L keys, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What every attention layer of one forward pass needs besides its input."""

    cos: Tensor
    """[B, S, 1, R] float32 or float64, as `rotation` makes it."""
    sin: Tensor
    """[B, S, 1, R] float32 or float64, as `rotation` makes it."""
    mask: Tensor | None
    """[B, 1, S, L] additive, 0 or -inf, in the compute dtype; None means plainly causal."""


def packed_mask(documents: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Additive mask that is causal and does not cross documents; None where plain causality is the same.

    documents [B, S] int64, equal inside a document, -1 on padding -> [B, 1, S, S] or None. A padding position
    sees itself, so that no row of the softmax is empty.
    """
    if bool((documents == documents[:, :1]).all()):
        return None
    length = documents.shape[1]
    allowed = documents.unsqueeze(2) == documents.unsqueeze(1)
    allowed &= torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~allowed, float("-inf")).unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention. q [B, S, H, A], k [B, L, G, A], v [B, L, G, C] with G dividing H -> [B, S, H, C].

    The fused CPU and older GPU kernels want values as wide as keys: narrower values are padded with zeros for
    them (the padding only adds zero columns to the output).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    width = v.shape[-1]
    padded = width < k.shape[-1]
    if padded:
        v = F.pad(v, (0, k.shape[-1] - width))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if padded:
        out = out[..., :width]
    return out.transpose(1, 2)
