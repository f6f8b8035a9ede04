"""MiniMax Text 01 and M1: lightning attention in most layers, experts in all, sums that are normalised at once."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.mixtral import NAMES
from services.compute.model.families.naming import UNUSED, Family, Refs, TensorRef, standard_refs
from services.compute.model.families.windows import read_kinds, same_window
from services.compute.model.mixers import Lightning
from services.compute.model.spec import LayerSpec, ModelSpec, SumFactors

_ATTENTION, _LIGHTNING = "full_attention", "linear_attention"
# The publisher's keys of the factors, by transformers' ones.
_FACTORS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
# Tables of the layers' slopes, which follow from the sizes.
_SLOPES = ("*.self_attn.slope_rate", "*.self_attn.*_decay")


def read_spec(config: Config) -> ModelSpec:
    """Read a MiniMax config.json, in the spelling of transformers or of its publisher. Raises ModelError."""
    config.pass_over("block_size", "shared_moe_mode")  # lengths of blocks change no result
    config.require("hidden_act", "silu")
    config.require("shared_intermediate_size", 0)
    config.require("postnorm", True)
    spec = base_spec(config, "minimax", norm_eps=1e-5, theta=1e6)
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=True)
    kinds, mlp_sum = _kinds(config, spec.n_layers), _factors(config, "mlp")
    attention = replace(_rotated(config, spec, same_window(config, spec)[0]), mixing_sum=_factors(config, "full_attn"))
    last = spec.n_layers - 1 + 1e-5
    lightning = LayerSpec(attends=False, mixing_sum=_factors(config, "linear_attn"))
    layers = (
        replace(lightning, mixer=Lightning(spec.n_heads, spec.head_dim, 1 - index / last + 1e-5))
        if kind == _LIGHTNING
        else attention
        for index, kind in enumerate(kinds)
    )
    return replace(
        spec,
        layers=tuple(replace(layer, moe=moe, mlp_sum=mlp_sum) for layer in layers),
        # The residual is what the norm before each part returns: the norms belong to the sums.
        pre_norm=False,
        post_norm=True,
        sum_norm=True,
        embed_norm=True,
        final_norm=False,
    )


def _factors(config: Config, part: str) -> SumFactors:
    for name in ("alpha", "beta"):
        config.fill(f"{part}_{name}_factor", config.raw(f"{_FACTORS[part]}_{name}"))
    return SumFactors(*(config.number(f"{part}_{name}_factor", 1.0) for name in ("alpha", "beta")))


def _rotated(config: Config, spec: ModelSpec, layer: LayerSpec) -> LayerSpec:
    """Return the layer with the rotated part of a head that the publisher's code reads. Raises ModelError."""
    rotary_dim = config.integer("rotary_dim", spec.head_dim)
    if rotary_dim % 2 or rotary_dim > spec.head_dim:
        raise config.error("rotary_dim", f"expected an even number up to head_dim {spec.head_dim}, found {rotary_dim}")
    return replace(layer, rope=layer.rope and replace(layer.rope, rotary_dim=rotary_dim))


def _kinds(config: Config, n_layers: int) -> list[str]:
    """Return the kind of every layer. Raises ModelError."""
    numbers = config.raw("attn_type_list")
    if isinstance(numbers, list):
        config.fill("layer_types", [{0: _LIGHTNING, 1: _ATTENTION}.get(number, number) for number in numbers])
    default = [(_ATTENTION, _LIGHTNING)[index % 2] for index in range(n_layers)]
    return read_kinds(config, n_layers, (_ATTENTION, _LIGHTNING), default)


def refs(spec: ModelSpec) -> Refs:
    """Name MiniMax's tensors: the norm after a sum is stored as that of the next part's input."""
    names = replace(NAMES, attn_post_norm=NAMES.mlp_norm)
    refs = standard_refs(spec, names, embed_norm="model.layers.0.input_layernorm")
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", f"model.layers.{index}.self_attn."
        last = index == spec.n_layers - 1
        following = "model.norm" if last else f"model.layers.{index + 1}.{names.attn_norm}"
        refs[f"{key}mlp_post_norm"] = TensorRef(f"{following}.weight")
        if not isinstance(layer.mixer, Lightning):
            continue
        for part, name in enumerate("qkv"):
            fused = TensorRef(f"{module}qkv_proj.weight", unit=layer.mixer.head_dim, part=part, n_parts=3)
            refs[f"{key}lightning_{name}"] = fused
        for name, stored in (("gate", "output_gate"), ("norm", "norm"), ("out", "out_proj")):
            refs[f"{key}lightning_{name}"] = TensorRef(f"{module}{stored}.weight")
    return refs


FAMILY = Family(
    "MiniMaxForCausalLM",
    "minimax",
    read_spec,
    refs,
    (*UNUSED, *_SLOPES),
    aliases=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
)
