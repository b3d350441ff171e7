"""Cross-entropy of a linear head without the whole logits."""

from moesys.kernels.cross_entropy.op import IGNORE, linear_cross_entropy

__all__ = ["IGNORE", "linear_cross_entropy"]
