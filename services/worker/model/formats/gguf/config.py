"""Turns the metadata of a GGUF file into the config.json of the same model, which its family reads. Free of torch."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

from services.worker.model.families.config import Config
from services.worker.model.families.naming import Family
from services.worker.model.formats.gguf.architectures import ARCHITECTURES, Architecture
from services.worker.model.formats.gguf.container import GgufFile, TensorInfo
from services.worker.model.formats.gguf.metadata import Metadata
from services.worker.model.spec import ModelError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FACTORS = {"": "rope_freqs.weight", "short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
_TOKENS = "tokenizer.ggml.tokens"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Keys that do not change the computation, or repeat what tensors show.
_PASSED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal", "pooling_type")
_DTYPES = {"F32": "float32", "F16": "float16"}  # of checkpoints whose matrices all have this type


def find_architecture(metadata: Metadata) -> Architecture:
    """Return the file's architecture. Raises ModelError."""
    name = metadata.text("general.architecture")
    if name == "llama" and metadata.integer("llama.expert_count", 0):
        name = "mixtral"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise metadata.error("general.architecture", f"{name!r} is not implemented; known: {known}")
    return ARCHITECTURES[name]


def read_config(file: GgufFile, family: Family, architecture: Architecture) -> Config:
    """Return the config.json of a model in the spelling of its family. Raises ModelError naming the key of GGUF."""
    metadata = file.metadata
    keys = _Keys(metadata)
    values: dict[str, Any] = {"architectures": [architecture.hub], **architecture.constants}
    for key, name in architecture.keys.items():
        if (value := keys.value(key)) is not None:
            values[family.spelling.get(name, name)] = value
    values |= _by_tensors(file, architecture)
    values |= _of_heads(keys, architecture, values, family)
    values |= _of_gemma(keys, values) if architecture.hub.startswith("Gemma") else {}
    if scaling := _rope_scaling(keys, file):
        values["rope_scaling"] = scaling
    values["eos_token_id"] = [metadata.integer(key) for key in _ENDS if key in metadata]
    keys.refuse_unread()
    return Config(values, metadata.file)


class _Keys:
    """The keys of the file's architecture; it records which were read."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._prefix = f"{metadata.text('general.architecture')}."
        self._read = {f"{self._prefix}{key}" for key in _PASSED}

    def value(self, key: str) -> Any:
        """Return a value of any type; None if the key is absent."""
        return self.metadata.get(self._seen(key))

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(self._seen(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(self._seen(key), default)

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self._seen(key), default)

    def error(self, key: str, problem: str) -> ModelError:
        return self.metadata.error(f"{self._prefix}{key}", problem)

    def refuse_unread(self) -> None:
        """Raise ModelError for keys that may change the computation; a value of 0, false or "" leaves it as it is."""
        for key, value in self.metadata.items():
            if key.startswith(self._prefix) and key not in self._read and value:
                raise self.metadata.error(key, "is not implemented for this architecture")

    def _seen(self, key: str) -> str:
        name = f"{self._prefix}{key}"
        self._read.add(name)
        return name


def _by_tensors(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """What the stored tensors show: the vocabulary's size, a tied head, biases, the dtype."""
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelError(f"{file.metadata.file}: {EMBEDDING}: missing")
    n_tokens = len(file.metadata.texts(_TOKENS))
    if n_tokens > embedding.shape[0]:
        raise file.metadata.error(_TOKENS, f"{n_tokens} tokens, but {EMBEDDING} has {embedding.shape[0]} rows")
    kinds = Counter(info.type.name for info in file.tensors.values() if len(info.shape) > 1)
    found: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _DTYPES.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16",
    }
    return found | {key: True for key, name in architecture.biases.items() if name in file.tensors}


def _of_heads(keys: _Keys, architecture: Architecture, values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Check the sizes of heads, and return the rotated part of a head if the architecture has one."""
    hidden, heads = (values.get(family.spelling.get(key, key)) for key in ("hidden_size", "num_attention_heads"))
    sized = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    head_dim = values.get("head_dim") or (hidden // heads if sized else 0)  # type: ignore[operator]
    if (found := keys.integer("attention.value_length", head_dim)) != head_dim:
        raise keys.error("attention.value_length", f"expected attention.key_length {head_dim}, found {found}")
    rotated = keys.integer("rope.dimension_count", head_dim)
    if architecture.partial and head_dim:
        return {architecture.partial: rotated / head_dim}
    if rotated != head_dim:
        raise keys.error("rope.dimension_count", f"expected {head_dim}, the size of a head, found {rotated}")
    return {}


def _of_gemma(keys: _Keys, values: dict[str, Any]) -> dict[str, Any]:
    """Gemma 2 and 3 divide scores by the root of the head's size; their largest models by that of other sizes."""
    if values["architectures"] == ["GemmaForCausalLM"]:
        return {}
    hidden, heads, layers = (values.get(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    largest = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}[values["architectures"][0]]
    per_head = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and layers == largest
    found = {"query_pre_attn_scalar": hidden // heads if per_head else values.get("head_dim")}  # type: ignore[operator]
    if values["architectures"] == ["Gemma3ForCausalLM"]:
        found["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
        found["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern", 6)
    return found


def _rope_scaling(keys: _Keys, file: GgufFile) -> dict[str, Any]:
    """Return the rope's scaling as config.json says it; {} if there is none."""
    kind = keys.text("rope.scaling.type", "none")
    linear = keys.number("rope.scale_linear", 1.0)  # key of the first files
    factor = keys.number("rope.scaling.factor", linear)
    original = keys.integer("rope.scaling.original_context_length", 0)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    factors = {name: _factors(file.tensors.get(tensor)) for name, tensor in FACTORS.items()}
    if any(factors.values()):
        # Frequencies are divided by stored factors: LongRoPE, or Llama 3's scaling, for all lengths the same.
        return {
            "rope_type": "longrope",
            "short_factor": factors["short"] or factors[""],
            "long_factor": factors["long"] or factors[""],
            "attention_factor": attention,
            "original_max_position_embeddings": original or keys.integer("context_length"),
        }
    if kind in ("none", "linear") and attention == 1.0:
        scaled = factor != 1.0 and (kind == "linear" or linear != 1.0)
        return {"rope_type": "linear", "factor": factor} if scaled else {}
    if kind == "yarn":
        settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original:
            settings["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := keys.value(f"rope.scaling.yarn_{name}")) is not None:
                settings[name] = value
        return settings
    raise keys.error("rope.scaling.type", f"{kind!r} with attn_factor {attention:g} is not implemented")


def _factors(info: TensorInfo | None) -> list[float]:
    """Return the numbers of a small F32 tensor; [] if it is absent. Raises ModelError."""
    if info is None:
        return []
    if info.type.name != "F32" or len(info.shape) != 1:
        raise ModelError(
            f"{info.file}: {info.name}: expected a list in F32, found {list(info.shape)} in {info.type.name}"
        )
    with info.file.open("rb") as stream:
        stream.seek(info.offset)
        return list(struct.unpack(f"<{info.shape[0]}f", stream.read(info.n_bytes)))
