"""Layers with a state in a GGUF file: what its keys say of them, and their tensors. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.compute.model.families.fused import concatenated
from services.compute.model.families.naming import Refs, TensorRef, linear_refs
from services.compute.model.families.statespace import ATTENTION, STATE
from services.compute.model.formats.gguf.container import GgufFile
from services.compute.model.formats.gguf.keys import Keys
from services.compute.model.mixers import DeltaNet, Lightning, Mamba, Mamba2, Mixer, ShortConv
from services.compute.model.spec import ModelError

_KV_HEADS, _INNER, _ROUTER = "attention.head_count_kv", "ssm.inner_size", ".ffn_gate_inp.weight"
_DRAFTS = "nextn_predict_layers"
_OF_HEADS = {"rate": "beta", "dt": "alpha"}  # names of the two numbers of each value head
_SIGMOID = 2  # value of `expert_gating_func`


def of_states(keys: Keys, file: GgufFile, hub: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that describe layers with a state, by Bamba's names. Raises ModelError."""
    match hub:
        case "Lfm2ForCausalLM" | "Lfm2MoeForCausalLM":
            if hub == "Lfm2MoeForCausalLM":
                _require_sigmoid(keys)
            return {"layer_types": _kinds(keys, "conv")}
        case "GraniteMoeHybridForCausalLM":
            shared = values.get("shared_intermediate_size") or values.get("intermediate_size")
            sizes = {"shared_intermediate_size": shared, "num_local_experts": values.get("num_local_experts") or 0}
            return sizes | {"layer_types": _kinds(keys, STATE[0])} | _of_heads(keys, values)
        case "NemotronHForCausalLM":
            return _of_nemotron(keys, values) | _of_heads(keys, values)
        case "Mamba2ForCausalLM":
            return _of_heads(keys, values)
        case "MambaForCausalLM" | "FalconMambaForCausalLM":
            return _of_channels(keys, values)
        case "JambaForCausalLM":
            return _of_channels(keys, values) | _of_jamba(keys, file)
        case "Qwen3NextForCausalLM" | "Qwen3_5ForCausalLM" | "Qwen3_5MoeForCausalLM":
            return {"linear_value_head_dim": _quotient(keys, "ssm.time_step_rank")} | _without_drafts(keys)
    return {}


def _without_drafts(keys: Keys) -> dict[str, Any]:
    """Return the number of layers without the last ones, which only draft tokens, and theirs. Raises ModelError."""
    n_drafts, n_layers = keys.integer(_DRAFTS, 0), keys.integer("block_count", 0)
    if not n_drafts:
        return {}
    if not 0 < n_drafts < n_layers:
        raise keys.error(_DRAFTS, f"expected fewer than block_count {n_layers}, found {n_drafts}")
    return {"num_hidden_layers": n_layers - n_drafts, "num_nextn_predict_layers": n_drafts}


def _require_sigmoid(keys: Keys) -> None:
    """Raise ModelError for another function of the router's logits."""
    if (gating := keys.integer("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise keys.error("expert_gating_func", f"{gating} is not implemented here; allowed: {_SIGMOID} (sigmoid)")


def _of_jamba(keys: Keys, file: GgufFile) -> dict[str, Any]:
    """Return in which layers attention and experts are. Raises ModelError."""
    mixed = [f"blk.{index}{_ROUTER}" in file.tensors for index in range(keys.integer("block_count", 0))]
    places = {"attn": _period(keys, _KV_HEADS, keys.layers(_KV_HEADS)), "expert": _period(keys, "expert_count", mixed)}
    layers = {f"{part}_layer_period": period for part, (period, _) in places.items()}
    layers |= {f"{part}_layer_offset": first for part, (_, first) in places.items()}
    return layers if any(mixed) else layers | {"num_experts": 1}


def _kinds(keys: Keys, other: str) -> list[str]:
    """Return the kind of each layer: attention or `other`."""
    return [ATTENTION[1] if attends else other for attends in keys.layers(_KV_HEADS)]


def _of_nemotron(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind of each layer: attention, a state-space layer, an MLP or experts. Raises ModelError."""
    mlp = "moe" if "n_routed_experts" in values else "mlp"
    if mlp == "moe":
        _require_sigmoid(keys)
    parts = zip(keys.layers(_KV_HEADS), keys.layers("feed_forward_length"), strict=True)
    kinds = {(True, False): ATTENTION[1], (False, True): mlp, (False, False): STATE[1]}
    of_layers = [kinds.get(part, "") for part in parts]
    if "" in of_layers:
        problem = f"layer {of_layers.index('')} also has KV heads; allowed: one of both"
        raise keys.error("feed_forward_length", problem)
    return {"layers_block_type": of_layers}


def _of_heads(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the size of all heads of Mamba 2. Raises ModelError."""
    return {"mamba_d_head": _quotient(keys, "ssm.time_step_rank")} | _expanded(keys, values)


def _of_channels(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the number of Mamba's channels. Raises ModelError."""
    expanded = _expanded(keys, values)
    if not expanded:
        problem = f"expected a multiple of embedding_length {values.get('hidden_size')}, found {keys.integer(_INNER)}"
        raise keys.error(_INNER, problem)
    return expanded


def _expanded(keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    hidden, inner = values.get("hidden_size"), keys.integer(_INNER)
    if not isinstance(hidden, int) or hidden <= 0 or inner <= 0 or inner % hidden:
        return {}
    return {"mamba_expand": inner // hidden}


def _quotient(keys: Keys, divisor: str) -> int:
    """Return the numbers of a head. Raises ModelError."""
    inner, heads = keys.integer(_INNER), keys.integer(divisor)
    if heads <= 0 or inner % heads:
        raise keys.error(_INNER, f"expected a multiple of {divisor} {heads}, found {inner}")
    return inner // heads


def _period(keys: Keys, key: str, layers: list[bool]) -> tuple[int, int]:
    """Return every how many layers one has a part, and the first of them. Raises ModelError."""
    places = [index for index, has in enumerate(layers) if has]
    first = places[0] if places else 0
    period = places[1] - first if len(places) > 1 else max(len(layers), 1)
    if places and (first >= period or places != list(range(first, len(layers), period))):
        raise keys.error(key, f"expected every n-th layer, found layers {places[:8]}")
    return period, first


def mixer_refs(key: str, module: str, mixer: Mixer, *, tiled: bool = False) -> Refs:
    """Return the references of a layer's tensors with a state; `tiled` as in `Architecture`. Raises ModelError."""
    match mixer:
        case ShortConv():
            refs = concatenated(f"{module}shortconv.in_proj", {f"{key}conv_{part}": mixer.size for part in "bcx"})
            filters = TensorRef(f"{module}shortconv.conv.weight")
            return refs | {f"{key}filter": filters, f"{key}conv_out": TensorRef(f"{module}shortconv.out_proj.weight")}
        case Mamba2():
            return _mamba2_refs(key, module, mixer)
        case Mamba():
            return _mamba_refs(key, module, mixer)
        case DeltaNet():
            return _tiled_delta_refs(key, module, mixer) if tiled else _delta_refs(key, module, mixer)
        case Lightning():
            raise ModelError("GGUF has no names of tensors of lightning attention")


def _mamba2_refs(key: str, module: str, mixer: Mamba2) -> Refs:
    states = mixer.n_groups * mixer.n_states
    filtered = {"x": mixer.size, "b": states, "c": states}
    products = {"z": mixer.size, **filtered, "dt": mixer.n_heads}
    refs = concatenated(f"{module}ssm_in", {f"{key}ssm_{part}": n for part, n in products.items()}, bias=mixer.bias)
    filters = {f"{key}filter_{part}": n for part, n in filtered.items()}
    refs |= concatenated(f"{module}ssm_conv1d", filters, bias=mixer.conv_bias)
    refs[f"{key}ssm_a"] = TensorRef(f"{module}ssm_a", folded=1, exponential=True)
    refs[f"{key}ssm_skip"] = TensorRef(f"{module}ssm_d", folded=1)
    refs[f"{key}ssm_step"] = TensorRef(f"{module}ssm_dt.bias")
    if mixer.gate != "plain":
        refs[f"{key}ssm_norm"] = TensorRef(f"{module}ssm_norm.weight", folded=mixer.size // mixer.n_groups)
    return refs | linear_refs(f"{key}ssm_out", f"{module}ssm_out", mixer.bias)


def _mamba_refs(key: str, module: str, mixer: Mamba) -> Refs:
    refs = concatenated(f"{module}ssm_in", {f"{key}ssm_x": mixer.size, f"{key}ssm_z": mixer.size}, bias=mixer.bias)
    refs |= concatenated(f"{module}ssm_conv1d", {f"{key}filter": mixer.size}, bias=mixer.conv_bias)
    refs |= concatenated(f"{module}ssm_dt", {f"{key}ssm_dt": mixer.size}, bias=True)
    refs[f"{key}rates"] = TensorRef(f"{module}ssm_a", exponential=True)
    refs[f"{key}ssm_skip"] = TensorRef(f"{module}ssm_d")
    refs[f"{key}ssm_select"] = TensorRef(f"{module}ssm_x.weight")
    if mixer.norms == "weighted":
        names = {"step_norm": "ssm_dt_norm", "b_norm": "ssm_b_norm", "c_norm": "ssm_c_norm"}
        refs |= {key + part: TensorRef(f"{module}{name}.weight") for part, name in names.items()}
    return refs | linear_refs(f"{key}ssm_out", f"{module}ssm_out", mixer.bias)


def _delta_refs(key: str, module: str, mixer: DeltaNet) -> Refs:
    refs, group = _common_delta_refs(key, module, mixer), mixer.n_value_heads // mixer.n_key_heads
    for half, name in enumerate(("rate", "dt")):
        refs[f"{key}delta_{name}"] = TensorRef(f"{module}ssm_ba.weight", unit=group, part=half, n_parts=2)
    return refs


def _tiled_delta_refs(key: str, module: str, mixer: DeltaNet) -> Refs:
    refs, group = _common_delta_refs(key, module, mixer), mixer.n_value_heads // mixer.n_key_heads
    refs |= {f"{key}delta_{part}": TensorRef(f"{module}ssm_{name}.weight") for part, name in _OF_HEADS.items()}
    units = dict.fromkeys(("delta_v", "filter_v", "delta_z"), mixer.value_dim)
    units |= dict.fromkeys(("delta_rate", "delta_dt", "delta_a", "delta_step"), 1)
    for part, unit in units.items():
        refs[key + part] = replace(refs[key + part], unit=unit, n_groups=mixer.n_key_heads, group=group)
    out = replace(refs[f"{key}delta_out"], tiled_columns=mixer.value_dim, n_groups=mixer.n_key_heads, group=group)
    return refs | {f"{key}delta_out": out}


def _common_delta_refs(key: str, module: str, mixer: DeltaNet) -> Refs:
    sizes = {"q": mixer.keys, "k": mixer.keys, "v": mixer.values}
    refs = concatenated(f"{module}attn_qkv", {f"{key}delta_{part}": n for part, n in sizes.items()})
    refs |= concatenated(f"{module}ssm_conv1d", {f"{key}filter_{part}": n for part, n in sizes.items()})
    refs[f"{key}delta_z"] = TensorRef(f"{module}attn_gate.weight")
    refs[f"{key}delta_a"] = TensorRef(f"{module}ssm_a", exponential=True)
    names = {"step": "ssm_dt.bias", "norm": "ssm_norm.weight", "out": "ssm_out.weight"}
    return refs | {f"{key}delta_{part}": TensorRef(module + name) for part, name in names.items()}
