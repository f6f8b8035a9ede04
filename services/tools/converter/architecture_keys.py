"""The metadata of GGUF that describe an architecture, from a model's spec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.compute.model.formats.gguf.architectures import ARCHITECTURES, Architecture
from services.compute.model.formats.gguf.config import FACTORS
from services.compute.model.layers.rope import frequencies
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError, ModelSpec, RopeSpec
from services.tools.converter.source import Source

Scalar = bool | int | float | str
_BY_HUB = {architecture.hub: name for name, architecture in ARCHITECTURES.items()}
# Of a spec, which a file says in another way or not, or which say how a file stores its weights.
_EXACT = ("quantization", "dtype", "eos_token_ids", "layers", "in_layers", "in_tables")
_TOLERANCE = 1e-6  # tolerance for the rounding of 32-bit numbers


def find_target(source: Source) -> tuple[str, Architecture]:
    """Return the architecture that GGUF has for a model. Raises ModelError."""
    hub = source.hub_family.architecture
    if hub not in _BY_HUB:
        raise ModelError(f"{source.path}: {hub} has no GGUF form here; known: {', '.join(sorted(_BY_HUB))}")
    return _BY_HUB[hub], ARCHITECTURES[_BY_HUB[hub]]


def architecture_name(name: str) -> str:
    """Return `general.architecture`: a mixture is a llama with experts."""
    return "llama" if name == "mixtral" else name


def architecture_keys(source: Source, architecture: Architecture) -> dict[str, Scalar]:
    """Return the keys after the architecture's name. Raises ModelError for what GGUF cannot say."""
    spec, spelling = source.hub_spec, source.hub_family.spelling
    known = _of_spec(spec)
    keys: dict[str, Scalar] = {}
    for key, name in architecture.keys.items():
        value = known.get(key, source.config.get(spelling.get(name, name)))
        if value is not None:
            keys[key] = value
    rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
    keys |= {"vocab_size": spec.vocab_size, "attention.value_length": spec.head_dim}
    if rope is not None:
        keys |= {"rope.dimension_count": rope.rotary_dim} | _scaling(source.path, rope)
    return keys


def _of_spec(spec: ModelSpec) -> dict[str, Scalar | None]:
    """The values of keys that every spec has; None for those that this one does not use."""
    windows = {layer.window for layer in spec.layers} - {None}
    ropes = [layer.rope for layer in spec.layers if layer.rope is not None]
    whole = [layer.rope for layer in spec.layers if layer.rope is not None and layer.window is None] or ropes
    moe = next((layer.moe for layer in spec.layers if layer.moe is not None), None)
    return {
        "embedding_length": spec.hidden_size,
        "block_count": spec.n_layers,
        "feed_forward_length": spec.ffn_size,
        "context_length": spec.max_positions,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.layer_norm_epsilon": spec.norm_eps,
        "attention.sliding_window": windows.pop() if len(windows) == 1 else None,
        "rope.freq_base": whole[0].theta if whole else None,
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "use_parallel_residual": spec.parallel_residual,
        "expert_count": moe.n_experts if moe else None,
        "expert_used_count": moe.routing.n_active if moe else None,
        "expert_feed_forward_length": moe.ffn_size if moe else None,
    }


def _scaling(path: Path, rope: RopeSpec) -> dict[str, Scalar]:
    if rope.kind in ("default", "llama3"):  # Llama 3's factors are a tensor
        return {}
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "longrope":
        return {
            "rope.scaling.original_context_length": rope.original_max_positions,
            "rope.scaling.attn_factor": rope.attention_factor,
        }
    raise ModelError(f"{path}: a rope of kind {rope.kind!r} is not written; allowed: default, linear, llama3, longrope")


def factor_tensors(spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of tensors that divide the rope's frequencies, [rotary_dim / 2] float32."""
    rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
    if rope is not None and rope.kind == "llama3":
        plain = RopeSpec(rope.theta, rope.rotary_dim)
        yield FACTORS[""], frequencies(plain, 1) / frequencies(rope, 1)
    if rope is not None and rope.kind == "longrope":
        yield FACTORS["short"], torch.tensor(rope.short_factors)
        yield FACTORS["long"], torch.tensor(rope.long_factors)


def check_written(file: Path, wanted: ModelSpec) -> None:
    """Raise ModelError if a written file does not describe the model that was converted."""
    written = describe(file).spec
    differ = [key for key, value in _comparable(wanted).items() if not _equal(value, _comparable(written)[key])]
    if differ:
        raise ModelError(f"{file.name}: GGUF cannot hold this model: it would be read with another {', '.join(differ)}")


def _comparable(spec: ModelSpec) -> dict[str, Any]:
    values = {key: value for key, value in asdict(spec).items() if key not in _EXACT}
    values["windows"] = tuple(layer.window for layer in spec.layers)
    values["experts"] = tuple(layer.moe for layer in spec.layers)
    plain = [layer.rope for layer in spec.layers if layer.rope is not None and layer.rope.kind == "default"]
    values["rope"] = {(rope.theta, rope.rotary_dim) for rope in plain}
    values["layers without a rope"] = tuple(layer.rope is None for layer in spec.layers)
    return values


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return bool(one == other)
