"""Reads the pooling of an embedding checkpoint, as sentence-transformers stores it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.model.files import read_json
from services.worker.model.formats.gguf.metadata import Metadata
from services.worker.model.spec import ModelError
from services.worker.protocol.rank_config import PoolingKind

# Both spellings of 1_Pooling/config.json: a flag for each kind, or a name.
_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
_GGUF_KINDS: dict[int, PoolingKind] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}  # 0: none, as for generation
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of a prompt's hidden states: their mean, the first or the last, optionally scaled to length 1."""

    kind: PoolingKind = "mean"
    normalise: bool = True


def read_pooling(folder: Path) -> Pooling:
    """Read modules.json and the pooling's config; the default is the mean, scaled to length 1. Raises ModelError."""
    modules = _modules(folder / "modules.json")
    file = folder / modules.get("Pooling", "1_Pooling") / "config.json"
    settings = read_json(file)
    return Pooling(_kind(file, settings) if settings else "mean", "Normalize" in modules or not modules)


def read_gguf_pooling(metadata: Metadata) -> Pooling:
    """Read the pooling of a GGUF file; the default is that of `read_pooling`. Raises ModelError."""
    key = f"{metadata.text('general.architecture')}.pooling_type"
    number = metadata.integer(key, 0)
    if number not in _GGUF_KINDS:
        raise metadata.error(key, f"pooling {number} is not implemented; known: {', '.join(map(str, _GGUF_KINDS))}")
    return Pooling(_GGUF_KINDS[number])


def _modules(file: Path) -> dict[str, str]:
    """Return the folder of each module by its class. Raises ModelError for modules that are not implemented."""
    listed = read_json(file, list)
    modules: dict[str, str] = {}
    for entry in listed:
        name = str(entry.get("type", "")).rpartition(".")[2] if isinstance(entry, dict) else repr(entry)
        if name not in _MODULES:
            raise ModelError(f"{file}: module {name!r} is not implemented; known: {', '.join(_MODULES)}")
        modules[name] = str(entry.get("path", ""))
    return modules


def _kind(file: Path, settings: dict[str, Any]) -> PoolingKind:
    asked = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    name = settings.get("pooling_mode")
    if name is not None:
        asked = [str(part) for part in (name if isinstance(name, list) else [name])]
    unknown = [key for key in asked if key not in _KINDS]
    if unknown or len(asked) != 1:
        known = ", ".join(_KINDS)
        raise ModelError(
            f"{file}: pooling {' + '.join(asked) or 'none'} is not implemented; known, one of them: {known}"
        )
    if settings.get("include_prompt", True) is not True:
        raise ModelError(f"{file}: include_prompt: {settings['include_prompt']!r} is not implemented; allowed: true")
    return _KINDS[asked[0]]
