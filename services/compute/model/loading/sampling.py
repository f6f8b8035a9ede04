"""Reads the publisher's sampling defaults from generation_config.json, or a GGUF file's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.compute.model.spec import ModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for fields that requests omit; None without a recommendation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31), "min_p": (0, 1), "repetition_penalty": (0.01, 10),
}  # fmt: skip


def override_sampling(given: dict[str, float]) -> SamplingDefaults:
    """Return a user's replacements of recommendations; raises ModelError naming an unknown field or a wrong value."""
    if unknown := given.keys() - _RANGES.keys():
        raise ModelError(f"`{min(unknown)}` is none of {', '.join(_RANGES)}")
    return _checked("", given)


def read_sampling(file: Path, generation: dict[str, Any]) -> SamplingDefaults:
    """The recommendations of a generation_config.json; raises ModelError naming `file` and an invalid value."""
    return _checked(f"{file}: ", generation)


def named(*sources: SamplingDefaults) -> dict[str, float]:
    """The given values by name; later sources outweigh earlier ones."""
    return {name: value for source in sources for name, value in asdict(source).items() if value is not None}


def _checked(place: str, generation: Mapping[str, Any]) -> SamplingDefaults:
    defaults: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise ModelError(f"{place}`{name}` must be from {low} to {high}, not {value!r}")
        defaults[name] = max(0, int(value) if name == "top_k" else value)  # a top_k of -1 means off, like 0
    return SamplingDefaults(**defaults)
