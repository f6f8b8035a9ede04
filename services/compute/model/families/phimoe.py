"""Phi 3.5 MoE: Mixtral with layer norms, biases in attention, LongRoPE, and experts chosen by SparseMixer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, one_rope, read_moe
from services.compute.model.families.mixtral import NAMES
from services.compute.model.families.naming import Family, StackedNames, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.families.windows import same_window
from services.compute.model.spec import ModelSpec, RopeSpec

_FACTORS = ("short_mscale", "long_mscale")  # factors of cos and sin


def read_spec(config: Config) -> ModelSpec:
    """Read a Phi 3.5 MoE config.json. Raises ModelError."""
    config.pass_over("input_jitter_noise")  # used in training only
    spec = base_spec(config, "phimoe", norm_eps=1e-5, ropes={"": _read_rope(config)}, attention_bias=False)
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=False)
    config.require("num_experts_per_tok", 2)
    jitter = config.number("router_jitter_noise", 0.01)
    moe = replace(moe, routing=ExpertRouting(moe.routing.n_active, False, "sparsemixer", jitter=jitter))
    return replace(
        spec,
        layers=tuple(replace(layer, moe=moe) for layer in same_window(config, spec)),
        norm="layer",
        norm_bias=True,
        head_bias=config.flag("lm_head_bias", False),
    )


def _read_rope(config: Config) -> RopeSpec:
    """Return the rope; LongRoPE has stored factors of cos and sin, in place of one that follows from the lengths."""
    key = config.first_of("rope_scaling", "rope_parameters")
    settings, head_dim = config.raw(key), config.quotient("hidden_size", "num_attention_heads")
    if not isinstance(settings, dict) or not any(settings.get(name) for name in _FACTORS):
        return one_rope(config, read_ropes(config, head_dim, default_theta=1e6))
    values = config.section(key)
    values.pass_over(*settings)
    short, long = (values.number(name) for name in _FACTORS)
    config.override(key, {name: value for name, value in settings.items() if name not in _FACTORS})
    rope = one_rope(config, read_ropes(config, head_dim, default_theta=1e6))
    return replace(rope, attention_factor=short, long_attention_factor=long)


# The alias is the name in the code that the weights were published with.
FAMILY = Family(
    "PhimoeForCausalLM",
    "phimoe",
    read_spec,
    partial(standard_refs, names=NAMES),
    stacked=StackedNames("mlp.router"),
    aliases=("PhiMoEForCausalLM",),
)
