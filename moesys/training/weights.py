"""Master weights, parameter groups and AdamW.

The model computes in its own dtype. What the optimiser updates are the masters: the model's parameters themselves
in float32 and float64, float32 copies where the model holds bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moesys.config import OptimizerConfig
from moesys.models.transformer import Transformer

_STATE = ("exp_avg", "exp_avg_sq")


class MasterWeights:
    """The weights that AdamW updates, by parameter name, with float32 gradients (float64 in a float64 model).

    For a bfloat16 model every low-precision gradient is added to its master's float32 gradient as soon as a
    micro-batch's backward has made it, so accumulation never rounds to bfloat16.
    """

    def __init__(self, model: Transformer, compute: torch.dtype) -> None:
        self.model = model
        self.masters: dict[str, Tensor] = dict(model.named_parameters())
        self.copied = compute == torch.bfloat16
        if self.copied:
            self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self.masters.items()}
            self._lower(compute)

    def _lower(self, compute: torch.dtype) -> None:
        """Cast the model, its routers excepted, and lead its gradients to the masters."""
        routers = {id(p) for _, layer in self.model.moe_layers() for p in layer.router.parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in routers:
                parameter.data = parameter.data.to(compute)
            master = self.masters[name]

            def collect(p: Tensor, master: Tensor = master) -> None:
                assert p.grad is not None
                if master.grad is None:
                    master.grad = p.grad.to(master.dtype, copy=True)
                else:
                    master.grad += p.grad
                p.grad = None

            parameter.register_post_accumulate_grad_hook(collect)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the masters' new values."""
        if self.copied:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; parameters that no loss reached are left out."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for master in self.masters.values():
            master.grad = None


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay belongs on this parameter: matrices only, no norm, bias, embedding, head or router."""
    if name in ("embedding", "head") or ".router." in name or name.endswith("bias"):
        return False
    return parameter.dim() >= 2


def make_optimizer(weights: MasterWeights, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the masters, with moments for all of them from the start (so that resuming fills them)."""
    groups: list[dict[str, Any]] = [
        {
            "params": [master for name, master in weights.masters.items() if decays(name, master) == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for master in weights.masters.values():
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }
    return optimizer


def checkpoint_tensors(weights: MasterWeights, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a run must get back, under logical names: masters, buffers, both moments and their step."""
    tensors = {f"model/{name}": master.detach() for name, master in weights.masters.items()}
    tensors |= {f"model/{name}": buffer for name, buffer in weights.model.named_buffers()}
    for name, master in weights.masters.items():
        for key in _STATE:
            tensors[f"optimizer/{key}/{name}"] = optimizer.state[master][key]
        tensors[f"optimizer/step/{name}"] = optimizer.state[master]["step"]
    return tensors
