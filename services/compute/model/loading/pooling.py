"""Reads how an embedding checkpoint pools, as sentence-transformers stores it. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.compute.model.families.config import MAX_INTEGER
from services.compute.model.files import read_json
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.spec import HeadActivation, ModelError
from services.compute.ranks.config import PoolingKind

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
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")  # only Dense may be there several times
_PROGRAM, _TRAINED_ONLY = "sentence_transformers.", "Dropout"
MODULES, NAMED = "modules.json", "config_sentence_transformers.json"
_LIMITS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_EMBEDDED = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
_ACTIVATIONS: dict[str, HeadActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
}


@dataclass(frozen=True, slots=True)
class DenseHead:
    """A product with a pooled state, and an activation."""

    folder: str  # folder of its weights within the checkpoint
    n_in: int
    n_out: int
    bias: bool
    activation: HeadActivation


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt's hidden states become a vector: mean, first or last; then layers, scaling to length 1, a cut."""

    kind: PoolingKind = "mean"
    normalise: bool = True
    dense: tuple[DenseHead, ...] = ()
    size: int = 0  # the first numbers, which are kept; 0: all


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The files of sentence-transformers besides the pooling."""

    max_tokens: int | None = None  # longest text, in tokens; None: what the model was made for
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts before what is embedded, by name
    default_prompt: str = ""  # the name of one of them; empty: none


def read_pooling(folder: Path) -> Pooling:
    """Read modules.json and the modules' configs; the default is the mean, scaled to length 1. Raises ModelError.

    `read_size` reads the size.
    """
    modules = _modules(folder / MODULES)
    names = [name for name, _ in modules]
    paths = {name: path for name, path in modules if name != "Dense"}
    file = folder / paths.get("Pooling", "1_Pooling") / "config.json"
    settings = read_json(file)
    if modules and not settings:
        raise ModelError(f"{file}: missing or empty, but {MODULES} lists a pooling")
    if "Normalize" in paths:
        scaling = folder / paths["Normalize"] / "config.json"
        _require(scaling, read_json(scaling), _EMBEDDED)
    return Pooling(
        _kind(file, settings) if settings else "mean",
        "Normalize" in names or not modules,
        tuple(_dense(folder, path) for name, path in modules if name == "Dense"),
    )


def read_size(file: Path, named: Mapping[str, Any]) -> int:
    """Return how many numbers are kept, 0: all, by config_sentence_transformers.json. Raises ModelError."""
    return _positive(file, named, "truncate_dim") or 0


def read_gguf_pooling(metadata: GgufMetadata) -> Pooling:
    """Read the pooling of a GGUF file; the default is that of `read_pooling`. Raises ModelError."""
    key = f"{metadata.text('general.architecture')}.pooling_type"
    number = metadata.integer(key, 0)
    if number not in _GGUF_KINDS:
        raise metadata.error(key, f"pooling {number} is not implemented; known: {', '.join(map(str, _GGUF_KINDS))}")
    return Pooling(_GGUF_KINDS[number])


def read_embedding_files(folder: Path, limits: Mapping[str, Any], texts: Mapping[str, Any]) -> EmbeddingFiles:
    """Read the contents of `limits_file` and NAMED; without a limit there, the tokenizer's is the model's.

    sentence-transformers writes no limit from 5.4 on, and null for prompts that a model lacks from 6 on. Raises
    ModelError.
    """
    file, named = limits_file(folder), folder / NAMED
    _require(file, limits, {"do_lower_case": False})
    options = limits.get("processor_kwargs") or limits.get("tokenizer_args") or {}
    if not isinstance(options, dict):
        raise ModelError(f"{file}: processor_kwargs: expected an object, found {options!r}")
    prompts, default = texts.get("prompts") or {}, texts.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelError(f"{named}: prompts: expected texts by their names, found {prompts!r}")
    if default is not None and default not in prompts:
        raise ModelError(f"{named}: default_prompt_name: {default!r} is none of {', '.join(prompts) or 'no prompts'}")
    given = {name: text for name, text in prompts.items() if text is not None}
    limit = _positive(file, options, "model_max_length") or _positive(file, limits, "max_seq_length")
    return EmbeddingFiles(limit, given, str(default) if default in given else "")


def limits_file(folder: Path) -> Path:
    """Return the file of a model's longest text, whose name older versions chose by the kind of the model."""
    files = [folder / name for name in _LIMITS]
    return next((file for file in files if file.is_file()), files[0])


def tokenizer_limit(tokenizer_config: Mapping[str, Any]) -> int | None:
    """Return the longest text of a tokenizer, in tokens; None without a limit."""
    length = tokenizer_config.get("model_max_length")
    return int(length) if isinstance(length, int | float) and 1 <= length <= MAX_INTEGER else None


def _positive(file: Path, settings: Mapping[str, Any], key: str) -> int | None:
    """Return a positive integer, or None if the key is absent or null. Raises ModelError."""
    value: Any = settings.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ModelError(f"{file}: {key}: expected a positive integer, found {value!r}")
    return None if value is None else int(value)


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module. Raises ModelError for modules that are not implemented."""
    listed = read_json(file, list)
    modules: list[tuple[str, str]] = []
    for entry in listed:
        kind, path = (
            (str(entry.get(key, "")) for key in ("type", "path")) if isinstance(entry, dict) else (repr(entry), "")
        )
        name = kind.rpartition(".")[2] if kind.startswith(_PROGRAM) else kind
        if name == _TRAINED_ONLY:
            continue
        if name not in _ORDER:
            raise ModelError(f"{file}: module {name!r} is not implemented; known: {', '.join(_ORDER)}")
        if (name == "Transformer" and path) or Path(path).is_absolute() or ".." in Path(path).parts:
            allowed = "'', the folder itself" if name == "Transformer" else "a folder within"
            raise ModelError(f"{file}: {name}: path: {path!r} is not implemented; allowed: {allowed}")
        modules.append((name, path))
    names = [name for name, _ in modules]
    if modules and "Pooling" not in names:
        raise ModelError(f"{file}: modules without Pooling are not implemented")
    repeated = [name for name in _ORDER if name != "Dense" and names.count(name) > 1]
    if repeated or names != sorted(names, key=_ORDER.index):
        raise ModelError(f"{file}: expected modules in the order {', '.join(_ORDER)}, found {', '.join(names)}")
    return modules


def _dense(folder: Path, path: str) -> DenseHead:
    file = folder / path / "config.json"
    settings = read_json(file)
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{file}: activation_function: {name!r} is not implemented; known: {known}")
    for key in ("in_features", "out_features"):
        size = settings.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelError(f"{file}: {key}: expected a positive integer, found {size!r}")
    _require(file, settings, {**_EMBEDDED, "use_residual": False})
    sizes = settings["in_features"], settings["out_features"]
    return DenseHead(path, *sizes, settings.get("bias", True) is True, _ACTIVATIONS[name])


def _kind(file: Path, settings: dict[str, Any]) -> PoolingKind:
    kinds = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    name = settings.get("pooling_mode")
    if name is not None:
        kinds = [str(part) for part in (name if isinstance(name, list) else [name])]
    kinds = kinds or ["mean"]
    unknown = [key for key in kinds if key not in _KINDS]
    if unknown or len(kinds) != 1:
        known = ", ".join(_KINDS)
        raise ModelError(f"{file}: pooling {' + '.join(kinds)} is not implemented; known, one of them: {known}")
    _require(file, settings, {"include_prompt": True})
    return _KINDS[kinds[0]]


def _require(file: Path, settings: Mapping[str, Any], allowed: Mapping[str, object]) -> None:
    """Raise ModelError for a key with another value than the allowed one; absent and null are allowed."""
    for key, value in allowed.items():
        if (stored := settings.get(key)) is not None and stored != value:
            raise ModelError(f"{file}: {key}: {stored!r} is not implemented; allowed: {json.dumps(value)}")
