"""Rotary position embedding (Su et al., arXiv:2104.09864) from tables computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from services.compute.model.spec import ModelError, QueryScale, RopeSpec

_MIB = 1 << 20
# Bytes per pair and position while tables are computed: the angle, cos and sin, and a scaled copy. Dynamic NTK has
# different frequencies at every position, in float64.
_TABLE_BYTES, _DYNAMIC_BYTES = 16, 40


def rope_tables(spec: RopeSpec, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of every position for one kind of rope: [max_positions, rotary_dim / 2] float32."""
    angles, factor = _angles(spec, max_positions), spec.attention_factor
    if spec.kind == "longrope" and spec.long_attention_factor is not None and spec.serves_long(max_positions):
        factor = spec.long_attention_factor
    return angles.cos() * factor, angles.sin() * factor


Turn = Callable[[torch.Tensor], None]


def by_places(
    rope: Callable[[torch.Tensor, torch.Tensor], Callable[[torch.Tensor], Turn]],
    tables: tuple[torch.Tensor, torch.Tensor],
    axes: Sequence[int],
) -> Callable[[torch.Tensor], Turn]:
    """Return a rope for positions [n], or for places [3, n]: a row's time, line and column (M-RoPE, arXiv:2409.12191).

    `rope` makes ropes of cos and sin, which are the `tables`; `axes`: by which of the three each pair turns.
    """
    device = tables[0].device
    of_pairs, pairs, usual = torch.tensor(axes, device=device), torch.arange(len(axes), device=device), rope(*tables)

    def at(positions: torch.Tensor) -> Turn:
        if positions.dim() == 1:
            return usual(positions)
        chosen = positions[of_pairs]  # [n_pairs, n]
        cos, sin = (table[chosen, pairs.unsqueeze(1)].T.contiguous() for table in tables)
        return rope(cos, sin)(torch.arange(len(cos), device=device))

    return at


def query_scale_tables(scale: QueryScale, head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cos and sin, [max_positions, head_dim / 2] float32, of a rotation that multiplies by the scale."""
    periods = (torch.arange(max_positions, dtype=torch.int64) + scale.first) // scale.period
    factors = 1 + scale.beta * torch.log1p(periods.float())
    cos = factors.unsqueeze(1).repeat(1, head_dim // 2)
    return cos, torch.zeros_like(cos)


def explain_rope(spec: RopeSpec, max_positions: int) -> str:
    """Describe the rope of sequences of up to `max_positions` in one line, for the log."""
    text = f"{spec.kind}, theta {spec.theta:g}, tables of {max_positions} positions"
    if spec.kind != "longrope":
        return text
    factors = "long" if spec.serves_long(max_positions) else "short"
    return f"{text}, {factors} factors (the model was first trained for {spec.original_max_positions})"


def check_tables(ropes: Iterable[RopeSpec], max_positions: int, available: int) -> None:
    """Raise ModelError if the tables of all positions do not fit into `available` bytes."""
    sizes = (rope.rotary_dim // 2 * (_DYNAMIC_BYTES if rope.kind == "dynamic" else _TABLE_BYTES) for rope in ropes)
    needed = max_positions * sum(sizes)
    if needed > available:
        raise ModelError(
            f"config.json: max_position_embeddings: tables of {max_positions} positions take {needed / _MIB:,.0f} MiB, "
            f"but {available / _MIB:,.0f} MiB are available; serve fewer positions (RYZANSTEIN_MAX_MODEL_LEN)"
        )


def _angles(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    positions = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1)
    if spec.kind == "dynamic":
        return positions * _dynamic_frequencies(spec, max_positions)
    return positions * frequencies(spec, max_positions)


def frequencies(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """Return the frequencies, [rotary_dim / 2] float32."""
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
    """Return the frequencies [max_positions, rotary_dim / 2]; a position has the base of a sequence that ends there.

    Generation token by token uses the same frequencies, and they do not depend on how a prompt is divided into chunks.
    """
    lengths = torch.arange(1, max_positions + 1, dtype=torch.float64).clamp(min=spec.original_max_positions)
    growth = spec.factor * lengths / spec.original_max_positions - (spec.factor - 1)
    theta = spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))  # [max_positions]
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    return (1.0 / theta.unsqueeze(1) ** exponents).float()


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Divide slow frequencies by the factor, keep fast ones, interpolate those between (Llama 3.1).

    Llama 4 Scout has none between: its two bounds are equal.
    """
    turns = spec.original_max_positions * base / (2 * math.pi)  # within the original context
    span = spec.high_freq_factor - spec.low_freq_factor
    smooth = (turns - spec.low_freq_factor) / span if span else (turns >= spec.low_freq_factor).float()
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * base / spec.factor + smooth * base


def _yarn(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of YaRN (Peng et al., arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The dimension that makes `turns` turns within the original context."""
        ratio = spec.original_max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return base / spec.factor * ramp + base * (1 - ramp)
