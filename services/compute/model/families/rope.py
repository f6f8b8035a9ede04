"""Reads the rotary settings of a config.json in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.compute.model.families.config import MAX_INTEGER, Config, is_positive
from services.compute.model.spec import ModelError, RopeSpec

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
_NEUTRAL = {"factor": 1.0, "attention_factor": 1.0}  # values for kinds without these settings
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SOURCES = ("rope_scaling", "rope_parameters")  # keys of transformers 4 and 5
_SCALED_KIND = "full_attention"  # the kind of layers that rope_scaling applies to if each kind has a rope


def read_ropes(
    config: Config,
    head_dim: int,
    *,
    theta_key: str = "rope_theta",
    default_theta: float = 10_000.0,
    partial_key: str = "partial_rotary_factor",
    partial: float | None = None,
) -> dict[str, RopeSpec]:
    """Return the rotary embedding of each kind of layer; the key "" stands for all kinds. Raises ModelError.

    `partial` is the default for the rotated part of a head; None if the family rotates whole heads and ignores the
    config.
    """
    outside = {
        "rope_theta": config.number(config.first_of(theta_key, "rope_theta"), default_theta),
        "partial_rotary_factor": config.raw(config.first_of(partial_key, "partial_rotary_factor")),
    }
    reader = _Reader(config, head_dim, _given(outside), partial)
    given = [reader.read(source) for source in _SOURCES if config.raw(source)]
    if len(given) == 2:
        old, new = given
        if old != new and old != {"": new.get(_SCALED_KIND, new.get(""))}:
            raise config.error("rope_parameters", "contradicts rope_scaling; keep one of the two")
    return given[-1] if given else reader.read("rope_parameters")


def fill_rope(config: Config, settings: Mapping[str, Any]) -> None:
    """Set the rope of a configuration that names none."""
    if not any(config.raw(source) for source in _SOURCES):
        config.override("rope_parameters", dict(settings))


def as_usual_rope(config: Config) -> None:
    """Text has the same position in all three dimensions of "mrope", which is the usual rope then."""
    for key in _SOURCES:
        settings = config.raw(key)
        if isinstance(settings, dict):
            rope = {name: value for name, value in settings.items() if not name.startswith("mrope")}
            usual = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            config.override(key, rope | usual)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the settings of one config."""

    config: Config
    head_dim: int
    outside: dict[str, Any]  # values at the top level, used for absent settings
    partial: float | None

    def read(self, source: str) -> dict[str, RopeSpec]:
        """Return the ropes that the key `source` describes, by kind of layer. Raises ModelError."""
        settings = self.config.raw(source) or {}
        if not isinstance(settings, dict):
            raise self.config.error(source, f"expected an object, found {settings!r}")
        per_kind = settings if settings and all(isinstance(v, dict) for v in settings.values()) else {"": settings}
        return {kind: self._rope(source, self.outside | _given(values)) for kind, values in per_kind.items()}

    def _rope(self, source: str, values: dict[str, Any]) -> RopeSpec:
        kind: Any = values.get("rope_type", values.get("type", "default"))
        kind = "longrope" if kind == "su" else kind  # older name of longrope
        if str(kind) not in _KEYS:
            raise self.config.error(source, f"rope_type {kind!r} is not implemented; known: {', '.join(_KEYS)}")
        part = values.get("partial_rotary_factor")
        if self.partial is None:
            if kind != "default" and part not in (None, 1):
                raise self.config.error(
                    source, f"partial_rotary_factor {part!r} is not implemented here for rope_type {kind!r}; allowed: 1"
                )
            part = 1.0
        values = {**values, "partial_rotary_factor": self.partial if part is None else part}
        return _read(self.config, source, kind, values, self.head_dim)


def _read(config: Config, source: str, kind: Any, values: dict[str, Any], head_dim: int) -> RopeSpec:
    neutral = {key for key, value in values.items() if _NEUTRAL.get(key) == value}
    unknown = values.keys() - _KEYS[kind] - _COMMON - neutral
    if unknown:
        raise config.error(source, f"{', '.join(sorted(unknown))} is not implemented for rope_type {kind!r}")
    if kind not in ("default", "longrope") and "factor" not in values:
        raise config.error(source, f"rope_type {kind!r} needs a factor")
    numbers = _Numbers(config, source, values)
    rotary_dim = _rotary_dim(numbers, kind, head_dim)
    original = _original_positions(config, numbers)
    factor = numbers.one("factor", config.integer("max_position_embeddings") / original)
    return RopeSpec(
        theta=numbers.one("rope_theta"),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor if kind != "default" else 1.0,
        original_max_positions=original if kind != "default" else 0,
        low_freq_factor=numbers.one("low_freq_factor", 1.0),
        high_freq_factor=numbers.one("high_freq_factor", 4.0),
        beta_fast=numbers.one("beta_fast", 32.0),
        beta_slow=numbers.one("beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_attention_factor(kind, factor, original, numbers),
        short_factors=numbers.several("short_factor"),
        long_factors=numbers.several("long_factor"),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The settings as numbers, all of them above 0; raises ModelError."""

    config: Config
    source: str
    values: dict[str, Any]

    def one(self, key: str, default: float | None = None) -> float:
        return self._checked(key, self.values.get(key, default))

    def several(self, key: str) -> tuple[float, ...]:
        listed = self.values.get(key, [])
        if not isinstance(listed, list):
            raise self.config.error(self.source, f"{key}: expected a list of numbers, found {listed!r}")
        return tuple(self._checked(key, value) for value in listed)

    def _checked(self, key: str, value: object) -> float:
        if not is_positive(value):
            raise self.config.error(self.source, f"{key}: expected a number above 0, found {value!r}")
        return float(value)


def _rotary_dim(numbers: _Numbers, kind: str, head_dim: int) -> int:
    """Return the number of rotated elements of a head. Raises ModelError if the settings do not fit."""

    def error(problem: str) -> ModelError:
        return numbers.config.error(numbers.source, problem)

    part = numbers.one("partial_rotary_factor")
    if part > 1:
        raise error(f"partial_rotary_factor: expected 1 at most, found {part:g}")
    rotary_dim, sizes = int(head_dim * part), f"head_dim {head_dim} and partial_rotary_factor {part:g}"
    if rotary_dim % 2 or not rotary_dim:
        raise error(f"{sizes}: {rotary_dim} rotated elements of a head cannot be paired")
    if kind == "dynamic" and rotary_dim == 2:
        raise error(f"{sizes}: a lone pair cannot be rotated by rope_type 'dynamic'")
    if kind in ("dynamic", "yarn") and (theta := numbers.one("rope_theta")) <= 1:
        raise error(f"rope_theta: expected a number above 1 for rope_type {kind!r}, found {theta:g}")
    if kind == "llama3" and (low := numbers.one("low_freq_factor", 1.0)) > numbers.one("high_freq_factor", 4.0):
        raise error(f"high_freq_factor: expected low_freq_factor {low:g} at least")
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if (count := len(numbers.several(name))) != rotary_dim // 2:
            source = f"head_dim, else hidden_size / num_attention_heads: {head_dim}"
            raise error(f"{name}: expected {rotary_dim // 2} numbers, a number for each pair ({source}), found {count}")
    return rotary_dim


def _original_positions(config: Config, numbers: _Numbers) -> int:
    """The original context length: next to the factors, or at the top level (phi3)."""
    key = "original_max_position_embeddings"
    top = config.integer(key if config.raw(key) else "max_position_embeddings")
    original = numbers.one(key, top)
    if not 1 <= original <= MAX_INTEGER:
        raise config.error(numbers.source, f"{key}: expected a number from 1 to {MAX_INTEGER}, found {original:g}")
    return int(original)


def _attention_factor(kind: str, factor: float, original: int, numbers: _Numbers) -> float:
    """The factor of YaRN (arXiv:2309.00071, section 3.4) or LongRoPE (arXiv:2402.13753, as published with phi3)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in numbers.values:
        return numbers.one("attention_factor")
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        if original == 1:
            raise numbers.config.error(
                numbers.source, "original_max_position_embeddings: expected more than 1, found 1"
            )
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if numbers.values.get("mscale") and numbers.values.get("mscale_all_dim"):
        return yarn_mscale(factor, numbers.one("mscale")) / yarn_mscale(factor, numbers.one("mscale_all_dim"))
    return yarn_mscale(factor, 1.0)


def yarn_multiplier(config: Config) -> float:
    """Return the factor of DeepSeek's attention scale that YaRN's `mscale_all_dim` stands for. Raises ModelError.

    To be called after `read_ropes`, which checks the settings.
    """
    source = next((key for key in _SOURCES if config.raw(key)), _SOURCES[0])
    settings = config.raw(source) or {}
    if settings.get("rope_type", settings.get("type")) != "yarn" or not settings.get("mscale_all_dim"):
        return 1.0
    numbers = _Numbers(config, source, settings)
    factor, mscale = numbers.one("factor"), numbers.one("mscale_all_dim")
    return yarn_mscale(factor, mscale) ** 2 if factor > 1 else 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of YaRN on cosines and sines; 1 if the rope is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
