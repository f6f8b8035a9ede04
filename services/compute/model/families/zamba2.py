"""Zamba 2: state-space layers (Mamba 2); before some stands a block of attention and an MLP, which layers share."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, Refs, TensorRef, linear_refs, standard_refs
from services.compute.model.families.statespace import STATE, mamba2_refs, read_mamba2
from services.compute.model.families.windows import read_kinds
from services.compute.model.mixers import Mamba2
from services.compute.model.spec import LayerSpec, ModelSpec, SharedBlock

_HYBRID = "hybrid"
_SPELLING = {
    "head_dim": "attention_head_dim",
    "mamba_n_heads": "n_mamba_heads",
    "mamba_d_head": "mamba_headdim",
    "mamba_n_groups": "mamba_ngroups",
}


def read_spec(config: Config) -> ModelSpec:
    """Read a Zamba 2 config.json. Raises ModelError."""
    config.pass_over("kv_channels", "num_query_groups", "use_mem_eff_path")
    for key in ("use_conv_bias", "use_shared_mlp_adapter"):
        config.require(key, True)
    config.require("tie_word_embeddings", True)  # without it, transformers ties no blocks either
    config.require("use_long_context", False)
    config.require("rms_norm_eps", 1e-5)  # that of the state-space layers
    hidden_size = config.integer("hidden_size")
    defaults = {"hidden_act": "gelu", "intermediate_size": 4 * hidden_size, "max_position_embeddings": 4096}
    for key, value in defaults.items():
        config.fill(key, value)
    head_dim = _share(config, "num_attention_heads", 2 * hidden_size, 32, "attention_head_dim")
    config.require("attention_hidden_size", 2 * hidden_size)
    config.override("head_dim", head_dim)
    rotates = config.flag("use_mem_rope", False)
    if not rotates:
        config.pass_over("rope_theta", "rope_scaling", "rope_parameters")
        for key in ("rope_scaling", "rope_parameters"):
            config.override(key, None)
    bias = config.flag("add_bias_linear", False)
    spec = replace(
        base_spec(config, "zamba2", tied=True, norm_eps=1e-5), attention_scale=(head_dim / 2) ** -0.5, mlp_bias=bias
    )
    rope = spec.layers[0].rope if rotates else None
    return replace(spec, layers=_layers(config, spec.n_layers, LayerSpec(rope=rope, mixer=_mixer(config, bias))))


def _share(config: Config, parts: str, whole: int, default: int, key: str) -> int:
    """Return the part of `whole` for each of `parts`, which `key` may only repeat. Raises ModelError."""
    n_parts = config.integer(parts, default)
    if whole % n_parts:
        raise config.error(parts, f"expected a divisor of {whole}, found {n_parts}")
    config.require(key, whole // n_parts)
    return whole // n_parts


def _mixer(config: Config, bias: bool) -> Mamba2:
    size = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    config.override("mamba_d_head", _share(config, "n_mamba_heads", size, 8, "mamba_headdim"))
    config.override("mamba_n_heads", config.integer("n_mamba_heads", 8))
    config.override("mamba_n_groups", config.integer("mamba_ngroups", 1))
    config.override("mamba_proj_bias", bias)
    config.fill("mamba_d_state", 64)
    return read_mamba2(config, config.integer("hidden_size"), least_step=config.number("time_step_min", 0.001))


def _layers(config: Config, n_layers: int, hybrid: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return the layers: `hybrid` ones with the shared blocks in turn, the others with its mixer alone."""
    key = config.first_of("layer_types", "layers_block_type")
    kinds = read_kinds(config, n_layers, (_HYBRID, *STATE), key=key)
    places = [index for index, kind in enumerate(kinds) if kind == _HYBRID]
    config.require("hybrid_layer_ids", places)
    n_blocks, rank = config.integer("num_mem_blocks", 1), config.integer("adapter_rank", 128)
    attention_rank = rank if config.flag("use_shared_attention_adapter", False) else 0
    alone = replace(hybrid, rope=None, attends=False, has_mlp=False)
    blocks = {index: SharedBlock(place % n_blocks, rank, attention_rank) for place, index in enumerate(places)}
    return tuple(replace(hybrid, block=blocks[i]) if i in blocks else alone for i in range(n_layers))


def refs(spec: ModelSpec) -> Refs:
    """Name Zamba 2's tensors: those of a block, and the factors of all of its layers, are stored in its first layer."""
    plain = tuple(replace(layer, attends=False, has_mlp=False) for layer in spec.layers)
    refs = standard_refs(replace(spec, layers=plain), norm="model.final_layernorm")
    firsts: dict[int, int] = {}  # the first layer of each block
    place = 0
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", f"model.layers.{index}."
        assert isinstance(layer.mixer, Mamba2)
        if layer.block is None:
            refs |= mamba2_refs(layer.mixer, key, f"{module}mamba.")
            continue
        refs |= mamba2_refs(layer.mixer, key, f"{module}mamba_decoder.mamba.")
        refs[f"{key}attn_norm"] = TensorRef(f"{module}mamba_decoder.input_layernorm.weight")
        refs[f"{key}block_out"] = TensorRef(f"{module}linear.weight")
        first = firsts.setdefault(layer.block.number, index)
        shared = f"model.layers.{first}.shared_transformer."
        if first == index:
            refs |= _block_refs(spec, f"blocks.{layer.block.number}.", shared)
        refs |= _factor_refs(spec, layer.block, key, shared, place)
        place += 1
    return refs


def _block_refs(spec: ModelSpec, key: str, module: str) -> Refs:
    refs = {f"{key}{part}": TensorRef(f"{module}self_attn.{part}_proj.weight") for part in "qkvo"}
    refs[f"{key}block_norm"] = TensorRef(f"{module}input_layernorm.weight")
    refs[f"{key}mlp_norm"] = TensorRef(f"{module}pre_ff_layernorm.weight")
    for start, part in ((0, "gate"), (spec.ffn_size, "up")):
        for stored, name in ((f"{key}{part}", "weight"), (f"{key}{part}.bias", "bias")):
            if name == "weight" or spec.mlp_bias:
                fused = TensorRef(f"{module}feed_forward.gate_up_proj.{name}", start=start, n_stored=2 * spec.ffn_size)
                refs[stored] = fused
    return refs | linear_refs(f"{key}down", f"{module}feed_forward.down_proj", spec.mlp_bias)


def _factor_refs(spec: ModelSpec, block: SharedBlock, key: str, module: str, place: int) -> Refs:
    """Name the factors of the layer that is number `place` of those with a block."""
    refs: Refs = {}
    for part in "qkv" if block.attention_rank else "":
        of_part = f"{module}self_attn.linear_{part}_adapter_list.{place}."
        refs[f"{key}{part}_first"] = TensorRef(f"{of_part}0.weight")
        refs[f"{key}{part}_second"] = TensorRef(f"{of_part}1.weight")
    of_mlp = f"{module}feed_forward.gate_up_proj_adapter_list.{place}."
    refs[f"{key}mlp_first"] = TensorRef(f"{of_mlp}0.weight")
    for start, part in ((0, "gate"), (spec.ffn_size, "up")):
        refs[f"{key}{part}_second"] = TensorRef(f"{of_mlp}1.weight", start=start, n_stored=2 * spec.ffn_size)
    return refs


FAMILY = Family("Zamba2ForCausalLM", "zamba2", read_spec, refs, spelling=_SPELLING)
