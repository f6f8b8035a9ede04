"""Muon for the matrices inside the layers, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon/). On models this small it reaches a given loss in clearly fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Recipe

# Quintic Newton-Schulz coefficients from the Muon post: steep at zero, so that five steps are enough.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest matrix with unit singular values, for [rows, columns], in bf16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is orthogonalised, with decoupled weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        velocity: Tensor = state["momentum"]
        velocity.lerp_(parameter.grad, 1 - momentum)
        nesterov = parameter.grad.lerp(velocity, momentum)
        # A tall matrix gets a larger step, so that its outputs change as much as a square one's.
        scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(orthogonalise(nesterov).to(parameter.dtype), alpha=-lr * scale)


def build_optimisers(model: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon over the layers' matrices; AdamW over the embedding and the norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in sorted(model.named_parameters()):
        inside = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if inside else others).append(parameter)
    muon = Muon(matrices, recipe.muon_lr, recipe.muon_momentum, recipe.weight_decay)
    adam = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return muon, adam


def learning_rate_scale(progress: float, warmup: float, decay: float) -> float:
    """Warm up linearly, hold at 1, then fall linearly to 0 over the last `decay` of the run (`progress` 0..1)."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, (1.0 - min(progress, 1.0)) / decay)
