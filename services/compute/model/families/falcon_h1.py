"""Falcon-H1: every layer has attention and a state-space layer (Mamba 2) side by side, and factors for all of them."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config, is_positive
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.statespace import read_mamba2, with_mamba2
from services.compute.model.mixers import Mamba2
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(
    **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}, mlp_norm="pre_ff_layernorm"
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Falcon-H1 config.json. Raises ModelError."""
    for key in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        config.require(key, False)
    config.pass_over("layers_block_type", "layer_types", "attn_layer_indices", "mamba_use_mlp")
    spec = base_spec(config, "falcon_h1", norm_eps=1e-5)
    inputs = config.number("attention_in_multiplier", 1.0)
    gate, down = _factors(config, "mlp_multipliers", 2)
    mixer = _read_mixer(config, spec.hidden_size)
    return replace(
        spec,
        layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers),
        # The factor of attention's inputs is one of queries, keys and values.
        attention_scale=spec.attention_scale * inputs * inputs * config.number("key_multiplier", 1.0),
        attention_factor=inputs * config.number("attention_out_multiplier", 1.0),
        mixer_factor=config.number("ssm_out_multiplier", 1.0),
        gate_factor=gate,
        down_factor=down,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
        mlp_bias=config.flag("mlp_bias", False),
    )


def _read_mixer(config: Config, hidden_size: int) -> Mamba2:
    if config.raw("mamba_d_ssm") is not None:
        config.override("mamba_d_head", config.quotient("mamba_d_ssm", "mamba_n_heads"))
    mixer = read_mamba2(config, hidden_size)
    before, normed = config.flag("mamba_norm_before_gate", True), config.flag("mamba_rms_norm", False)
    inputs = config.number("ssm_in_multiplier", 1.0)
    factors = tuple(inputs * factor for factor in _factors(config, "ssm_multipliers", 5))
    return replace(mixer, gate=("outside" if before else "inside") if normed else "plain", factors=factors)


def _factors(config: Config, key: str, n: int) -> tuple[float, ...]:
    """Return `n` numbers above 0; 1 for each if the key is absent. Raises ModelError."""
    values = config.raw(key)
    if values is None:
        return (1.0,) * n
    if not isinstance(values, list) or len(values) != n or not all(is_positive(value) for value in values):
        raise config.error(key, f"expected a list of {n} numbers above 0, found {values!r}")
    return tuple(float(value) for value in values)


def refs(spec: ModelSpec) -> Refs:
    """Name Falcon-H1's tensors."""
    return with_mamba2(spec, standard_refs(spec, _NAMES, norm="model.final_layernorm"), "model.layers.{}.mamba.")


FAMILY = Family("FalconH1ForCausalLM", "falcon_h1", read_spec, refs)
