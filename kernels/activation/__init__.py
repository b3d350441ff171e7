"""Feed-forward activations, gated and not."""

from moesys.kernels.activation.op import activate, activate_backward, is_gated

__all__ = ["activate", "activate_backward", "is_gated"]
