"""Rotary settings of a config.json, in the spelling of transformers 4 and of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from services.worker.model.families.config import Config
from services.worker.model.spec import RopeSpec

_KEYS = {
    "default": {"original_max_position_embeddings"},
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned"),
    },
    "longrope": {
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
    },
}
_NEUTRAL = {"factor": 1.0, "attention_factor": 1.0}  # of kinds that have no such setting
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_ropes(
    config: Config,
    head_dim: int,
    *,
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
    partial_key: str = "partial_rotary_factor",
    partial: float = 1.0,
) -> dict[str, RopeSpec]:
    """Return the rotary embedding of each kind of layer; the key "" stands for all kinds. Raises ModelError."""
    source = "rope_parameters" if config.raw("rope_parameters") is not None else "rope_scaling"
    settings = config.raw(source) or {}
    config.raw("rope_scaling")
    theta = config.number(config.first_of(theta_key, "rope_theta"), default_theta)
    partial = config.number(config.first_of(partial_key, "partial_rotary_factor"), partial)
    if not isinstance(settings, dict):
        raise config.error(source, f"expected an object, found {settings!r}")
    per_kind = settings if settings and all(isinstance(v, dict) for v in settings.values()) else {"": settings}
    return {
        kind: _read(config, source, {"rope_theta": theta, "partial_rotary_factor": partial} | _given(values), head_dim)
        for kind, values in per_kind.items()
    }


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read(config: Config, source: str, values: dict[str, Any], head_dim: int) -> RopeSpec:
    kind = values.get("rope_type", values.get("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)  # the first name of longrope
    if kind not in _KEYS:
        raise config.error(source, f"rope_type {kind!r} is not implemented; known: {', '.join(_KEYS)}")
    neutral = {key for key, value in values.items() if _NEUTRAL.get(key) == value}
    unknown = values.keys() - _KEYS[kind] - _COMMON - neutral
    if unknown:
        raise config.error(source, f"{', '.join(sorted(unknown))} is not implemented for rope_type {kind!r}")
    if kind not in ("default", "longrope") and "factor" not in values:
        raise config.error(source, f"rope_type {kind!r} needs a factor")
    rotary_dim = int(head_dim * float(values["partial_rotary_factor"]))
    if rotary_dim % 2:
        raise config.error(source, f"{rotary_dim} rotated elements of a head cannot be paired")
    original = _original_positions(config, values)
    factor = float(values.get("factor", config.integer("max_position_embeddings") / original))
    return RopeSpec(
        theta=float(values["rope_theta"]),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor if kind != "default" else 1.0,
        original_max_positions=original if kind != "default" else 0,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast", 32.0)),
        beta_slow=float(values.get("beta_slow", 1.0)),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_attention_factor(kind, factor, original, values),
        short_factors=tuple(map(float, values.get("short_factor", ()))),
        long_factors=tuple(map(float, values.get("long_factor", ()))),
    )


def _original_positions(config: Config, values: dict[str, Any]) -> int:
    """The length the model was first trained for: beside the factors, or (phi3) at the top level."""
    top = config.raw("original_max_position_embeddings")
    inner = values.get("original_max_position_embeddings")
    return int(inner or top or config.integer("max_position_embeddings"))


def _attention_factor(kind: str, factor: float, original: int, values: dict[str, Any]) -> float:
    """YaRN (arXiv:2309.00071), section 3.4; LongRoPE (arXiv:2402.13753) as published with phi3."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in values:
        return float(values["attention_factor"])
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and mscale_all:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
