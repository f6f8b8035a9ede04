"""A checkpoint holds all a run needs to go on as if it had never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Position:
    """How far a run has come. The data position is the step: a batch depends on the seed and the step alone."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


def save_checkpoint(
    path: Path, model: nn.Module, optimisers: tuple[torch.optim.Optimizer, ...], position: Position
) -> None:
    """Writes weights, optimiser state, random state and position; replaces the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "rng": torch.get_rng_state(),
        "position": [position.step, position.seconds, position.tokens],
    }
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimisers: tuple[torch.optim.Optimizer, ...]) -> Position:
    """Restores what `save_checkpoint` wrote into `model` and `optimisers`, and gives back the position."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    step, seconds, tokens = state["position"]
    return Position(step, seconds, tokens)
