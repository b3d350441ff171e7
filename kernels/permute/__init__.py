"""Sorting (token, choice) pairs by expert, and bringing the results home."""

from moesys.kernels.permute.op import Permutation, permute, sort_pairs, unpermute

__all__ = ["Permutation", "permute", "sort_pairs", "unpermute"]
