"""The feed-forward of all experts of a layer as one operation."""

from moesys.kernels.expert_mlp.op import expert_mlp

__all__ = ["expert_mlp"]
