"""Rotary position embedding (Su et al., arXiv:2104.09864) from tables computed once."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.spec import RopeSpec


class RotaryTables:
    """cos and sin of every position for one kind of rope."""

    def __init__(
        self, spec: RopeSpec, max_positions: int, device: torch.device, kernels: Bfloat16Kernels | None = None
    ) -> None:
        self._kernels = kernels
        self._half = spec.rotary_dim // 2
        angles = _angles(spec, max_positions)  # [max_positions, rotary_dim / 2] float32
        cos, sin = angles.cos() * spec.attention_factor, angles.sin() * spec.attention_factor
        self._cos, self._sin = cos.to(device), sin.to(device)  # [max_positions, rotary_dim / 2]

    def at(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of rows at `positions` [n]."""
        if self._kernels is not None:
            return KernelRotation(self._kernels, self._cos, self._sin, positions)
        cos = self._cos.index_select(0, positions).unsqueeze(1)  # [n, 1, rotary_dim / 2]
        sin = self._sin.index_select(0, positions).unsqueeze(1)
        # The first half of a head is rotated against the second: out = x cos + swap(x) [-sin, sin].
        return TorchRotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), self._half)


class Rotation(Protocol):
    """The rotation of one step's rows, shared by all layers."""

    def rotate_(self, heads: torch.Tensor) -> None:
        """Rotate the first rotary_dim elements of `heads` [n, n_heads, head_dim] in place."""
        ...


class KernelRotation:
    """By our kernel, which looks the angles up itself."""

    def __init__(self, kernels: Bfloat16Kernels, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        self._kernels, self._cos, self._sin, self._positions = kernels, cos, sin, positions

    def rotate_(self, heads: torch.Tensor) -> None:
        """Rotate the first rotary_dim elements of `heads` [n, n_heads, head_dim] in place."""
        self._kernels.rotate_(heads, self._cos, self._sin, self._positions)


class TorchRotation:
    """By torch."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, half: int) -> None:
        self._cos, self._sin, self._half = cos, sin, half

    def rotate_(self, heads: torch.Tensor) -> None:
        """Rotate the first rotary_dim elements of `heads` [n, n_heads, head_dim] in place."""
        x = heads[..., : 2 * self._half]
        x.copy_(torch.addcmul(x * self._cos, x.roll(self._half, -1), self._sin))


def explain_rope(spec: RopeSpec, max_positions: int) -> str:
    """Say in one line what sequences of up to `max_positions` get, for the log."""
    said = f"{spec.kind}, theta {spec.theta:g}, tables of {max_positions} positions"
    if spec.kind != "longrope":
        return said
    factors = "long" if spec.serves_long(max_positions) else "short"
    return f"{said}, {factors} factors (the model was first trained for {spec.original_max_positions})"


def _angles(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    positions = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1)
    if spec.kind == "dynamic":
        return positions * _dynamic_frequencies(spec, max_positions)
    return positions * _frequencies(spec, max_positions)


def _frequencies(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """Return [rotary_dim / 2] float32."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    base = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base)
    if spec.kind == "longrope":
        factors = spec.long_factors if spec.serves_long(max_positions) else spec.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    return base


def _dynamic_frequencies(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """Return [max_positions, rotary_dim / 2]: each position with the base of a sequence that ends there.

    That is what generation token by token sees, and it does not depend on how a prompt is cut into chunks.
    """
    lengths = torch.arange(1, max_positions + 1, dtype=torch.float64).clamp(min=spec.original_max_positions)
    growth = spec.factor * lengths / spec.original_max_positions - (spec.factor - 1)
    theta = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))  # [max_positions]
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    return (1.0 / theta.unsqueeze(1) ** exponents).float()


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated (Llama 3.1)."""
    turns = spec.original_max_positions * base / (2 * math.pi)  # within the first training's context
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * base / spec.factor + smooth * base


def _yarn(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Peng et al., arXiv:2309.00071, section 3.2."""

    def dimension(turns: float) -> float:
        """The dimension that turns so often within the original context."""
        ratio = spec.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return base / spec.factor * ramp + base * (1 - ramp)
