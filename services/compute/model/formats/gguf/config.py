"""Turns the metadata of a GGUF file into the config.json of the same model, which its family reads. Free of torch."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family
from services.compute.model.families.rope import yarn_mscale
from services.compute.model.families.windows import FULL, SLIDING
from services.compute.model.formats.gguf.architectures import ARCHITECTURES, Architecture
from services.compute.model.formats.gguf.container import GgufFile, TensorInfo
from services.compute.model.formats.gguf.keys import Keys
from services.compute.model.formats.gguf.metadata import GgufMetadata
from services.compute.model.formats.gguf.states import of_states
from services.compute.model.spec import ModelError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FACTORS = {"": "rope_freqs.weight", "short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
_TOKENS = "tokenizer.ggml.tokens"
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_ABSENT: Mapping[str, Any] = {"rope.freq_base": 10_000.0}  # llama.cpp's values of absent keys
_DTYPES = {"F32": "float32", "F16": "float16"}  # dtype of a checkpoint whose matrices all have this type


def find_architecture(metadata: GgufMetadata) -> Architecture:
    """Return the file's architecture. Raises ModelError."""
    name = metadata.text("general.architecture")
    if name == "llama" and metadata.integer("llama.expert_count", 0):
        name = "mixtral"
    if name == "mamba" and metadata.flag("mamba.ssm.dt_b_c_rms", False):
        name = "falconmamba"
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise metadata.error("general.architecture", f"{name!r} is not implemented; known: {known}")
    return ARCHITECTURES[name]


def read_config(file: GgufFile, family: Family, architecture: Architecture) -> Config:
    """Return the config.json of a model in the spelling of its family; absent keys have llama.cpp's values.

    Raises ModelError naming the key of GGUF, also for every key that is neither read nor without an effect.
    """
    keys = Keys(file.metadata, architecture.passed)
    keys.require(*architecture.needed)
    values: dict[str, Any] = {}  # values of config.json, by Llama's names
    for key, name in architecture.keys.items():
        if (value := keys.value(key, sparse=key in architecture.sparse)) is None:
            value = architecture.absent.get(key, _ABSENT.get(key))
        if value is not None:
            values[name] = value
    sizes = _sizes(keys, values)
    values |= _of_heads(keys, architecture, values, sizes)
    values |= _of_family(keys, architecture, values, sizes)
    values |= of_states(keys, file, architecture.hub, values)
    if scaling := _rope_scaling(keys, file, architecture):
        values["rope_scaling"] = scaling
    values["eos_token_id"] = [file.metadata.integer(key) for key in _ENDS if key in file.metadata]
    keys.refuse_unread(_repeated(keys, values, sizes))
    values |= _by_tensors(file, architecture)
    values = {family.spelling.get(name, name): value for name, value in values.items()}
    values |= {"architectures": [architecture.hub], **architecture.constants}
    return Config(values, file.metadata.file)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes that others follow from; 0 where the file's are wrong, which the family refuses by name."""

    hidden: int
    heads: int
    head: int
    layers: int


def _sizes(keys: Keys, values: Mapping[str, Any]) -> _Sizes:
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    hidden, heads, layers = (_size(values.get(name)) for name in names)
    head = keys.integer("attention.key_length", hidden // heads) if heads else 0
    return _Sizes(hidden, heads, head, layers)


def _size(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _repeated(keys: Keys, values: Mapping[str, Any], sizes: _Sizes) -> dict[str, float]:
    """Return the values with which keys only say again what others do."""
    scale = values.get("query_pre_attn_scalar", sizes.head)
    repeated = {
        "attention.head_count_kv": sizes.heads,
        "attention.key_length_swa": sizes.head,
        "attention.value_length_swa": sizes.head,
        "attention.scale": scale**-0.5 if scale else 0.0,
        "embedding_length_out": sizes.hidden,
        "rope.dimension_count_swa": keys.integer("rope.dimension_count", sizes.head),
        "rope.freq_base_swa": values.get("rope_theta", values.get("rotary_emb_base", 0.0)),
    }
    window = keys.metadata.get(f"{keys.prefix}attention.sliding_window")
    if isinstance(window, int) and window >= _size(values.get("max_position_embeddings")) > 0:
        repeated["attention.sliding_window"] = window  # it covers all positions
    return {key: value for key, value in repeated.items() if isinstance(value, int | float)}


def _by_tensors(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Keys that follow from the stored tensors: the vocabulary's size, a tied head, biases, the dtype."""
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelError(f"{file.metadata.file}: {EMBEDDING}: missing")
    n_tokens = len(file.metadata.texts(_TOKENS))
    if n_tokens > embedding.shape[0]:
        raise file.metadata.error(_TOKENS, f"{n_tokens} tokens, but {EMBEDDING} has {embedding.shape[0]} rows")
    kinds = Counter(info.type.name for info in file.tensors.values() if len(info.shape) > 1)
    values: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _DTYPES.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16",
    }
    kinds_in_layers = {name.partition(".")[2].partition(".")[2] for name in file.tensors if name.startswith("blk.")}
    return values | {key: name in kinds_in_layers for key, name in architecture.biases.items()}


def _of_heads(keys: Keys, architecture: Architecture, values: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Check the sizes of heads, and return what follows from them."""
    if (value_length := keys.integer("attention.value_length", sizes.head)) != sizes.head:
        raise keys.error("attention.value_length", f"expected attention.key_length {sizes.head}, found {value_length}")
    rotated = keys.integer("rope.dimension_count", sizes.head)
    whole = not architecture.partial and "rope.dimension_count" not in architecture.passed
    if whole and rotated != sizes.head:
        raise keys.error("rope.dimension_count", f"expected {sizes.head}, the size of a head, found {rotated}")
    if "attention.key_length" not in architecture.keys:
        if sizes.heads and sizes.head * sizes.heads != sizes.hidden:
            problem = f"expected {sizes.hidden // sizes.heads}, embedding_length / attention.head_count"
            raise keys.error("attention.key_length", f"{problem}, found {sizes.head}")
        implied: dict[str, Any] = {}
    else:
        implied = {
            "head_dim": sizes.head or None,
            "num_key_value_heads": values.get("num_key_value_heads", sizes.heads),
        }
    if architecture.partial and sizes.head:
        implied[architecture.partial] = rotated / sizes.head
    return implied


def _of_family(keys: Keys, architecture: Architecture, values: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Return what llama.cpp derives from other keys."""
    match architecture.hub:
        case "Gemma2ForCausalLM":
            return _of_gemma(sizes, 46) | _alternating(keys, architecture, sizes)
        case "Gemma3ForCausalLM":
            family_keys = _of_gemma(sizes, 62) | _alternating(keys, architecture, sizes)
            family_keys["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
            family_keys["final_logit_softcapping"] = values.get("final_logit_softcapping") or None  # 0: none
            if not values.get("sliding_window"):
                family_keys["layer_types"] = [FULL] * sizes.layers
            return family_keys
        case "GraniteForCausalLM":
            if keys.values("rope.scaling.finetuned") is False:
                raise keys.error("rope.scaling.finetuned", "false, a Granite without a rope, is not implemented")
            return _scales(values, sizes)
        case "GraniteMoeHybridForCausalLM":
            rotates = keys.values("rope.scaling.finetuned") is not False
            scales = _scales(values, sizes) | {"logits_scaling": values.get("logits_scaling") or 1.0}
            return scales | {"position_embedding_type": "rope" if rotates else "nope"}
        case "Qwen3MoeForCausalLM" if not values.get("moe_intermediate_size"):
            ffn, n_active = (_size(values.get(name)) for name in ("intermediate_size", "num_experts_per_tok"))
            return {"moe_intermediate_size": ffn // n_active} if n_active else {}
    return {}


def _scales(values: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Granite's scales; 0: none."""
    scales = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    scales["attention_multiplier"] = sizes.head**-0.5 if sizes.head else 0.0
    return {name: values.get(name) or default for name, default in scales.items()}


def _of_gemma(sizes: _Sizes, largest: int) -> dict[str, Any]:
    """Gemma 2 and 3 divide scores by the root of the head's size; their largest models by that of other sizes."""
    per_head = sizes.heads and sizes.layers == largest
    return {"query_pre_attn_scalar": sizes.hidden // sizes.heads if per_head else sizes.head}


def _alternating(keys: Keys, architecture: Architecture, sizes: _Sizes) -> dict[str, Any]:
    """Return the layers with a window, of which every so manieth has none, or as a list says. Raises ModelError."""
    key = "attention.sliding_window_pattern"
    pattern = keys.values(key)
    pattern = architecture.period if pattern is None else pattern
    if isinstance(pattern, tuple) and len(pattern) == sizes.layers:
        slides = [bool(one) for one in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        slides = [not pattern or index % pattern < pattern - 1 for index in range(sizes.layers)]
    else:
        problem = f"expected a number of layers, or a list of {sizes.layers}, as many as block_count, found {pattern!r}"
        raise keys.error(key, problem)
    return {"layer_types": [SLIDING if one else FULL for one in slides]}


def _rope_scaling(keys: Keys, file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Return the rope's scaling as config.json says it; {} if there is none. Raises ModelError."""
    kind = keys.text("rope.scaling.type", "linear")
    linear = keys.number("rope.scale_linear", 1.0)  # key of the first files
    factor = keys.number("rope.scaling.factor", linear)
    factor = 1.0 if kind == "none" or not factor else factor
    original = keys.integer("rope.scaling.original_context_length", 0)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    _check_extension(keys, kind)
    factors = {name: _factors(file.tensors.get(tensor)) for name, tensor in FACTORS.items()}
    if any(factors.values()) and kind != "yarn" and factor == 1.0:
        # Frequencies are divided by stored factors: LongRoPE, or Llama 3's scaling, for all lengths the same.
        return {
            "rope_type": "longrope",
            "short_factor": factors["short"] or factors[""],
            "long_factor": factors["long"] or factors[""],
            "attention_factor": attention,
            "original_max_position_embeddings": original or keys.integer("context_length"),
        }
    if any(factors.values()):
        raise keys.error(
            "rope.scaling.factor", f"{factor:g} of type {kind!r} with factors in tensors is not implemented"
        )
    if kind in ("none", "linear") and attention == 1.0:
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if kind == "yarn" and architecture.hub != "Gemma3ForCausalLM":  # llama.cpp also scales its local layers' rope
        return _yarn(keys, factor, original, attention)
    raise keys.error("rope.scaling.type", f"{kind!r} with attn_factor {attention:g} is not implemented")


def _check_extension(keys: Keys, kind: str) -> None:
    """Refuse a rope that YaRN only scales in part; a number below 0 stands for the default."""
    factor = keys.number("rope.scaling.yarn_ext_factor", 1.0)
    if (factor > 0 and factor != 1.0) or (factor == 0 and kind == "yarn"):
        raise keys.error("rope.scaling.yarn_ext_factor", f"{factor:g} is not implemented; allowed: 1")


def _yarn(keys: Keys, factor: float, original: int, attention: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        settings["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if (value := keys.value(f"rope.scaling.yarn_{name}")) is not None:
            settings[name] = value
    if attention != 1.0:
        settings["attention_factor"] = attention * yarn_mscale(factor)
    return settings


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
