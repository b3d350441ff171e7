"""The obviously right grouped GEMM."""

from __future__ import annotations

import torch
from torch import Tensor


def gmm_reference(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Row i of group e times b[e] (its transpose with trans_b), one row at a time.

    a [R, M], b [E, M, N] or [E, N, M] with trans_b, batch_sizes [E] integers that sum to R -> [R, N].
    """
    out = a.new_zeros(a.shape[0], b.shape[1] if trans_b else b.shape[2])
    row = 0
    for expert, size in enumerate(batch_sizes.tolist()):
        matrix = b[expert].T if trans_b else b[expert]
        for _ in range(size):
            out[row] = torch.mv(matrix.T, a[row])
            row += 1
    return out
