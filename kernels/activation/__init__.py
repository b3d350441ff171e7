"""Feed-forward activations, gated and not."""

from moesys.kernels.activation.op import activate, is_gated

__all__ = ["activate", "is_gated"]
