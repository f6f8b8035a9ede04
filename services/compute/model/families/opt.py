"""OPT: learned positions, whose table begins with two rows that no position has, and ReLU."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.plain import plain_spec
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(
    o="self_attn.out_proj", up="fc1", down="fc2", attn_norm="self_attn_layer_norm", mlp_norm="final_layer_norm"
)
_SPELLING = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_N_UNUSED = 2  # rows of the table of positions


def read_spec(config: Config) -> ModelSpec:
    """Read an OPT config.json. Raises ModelError."""
    config.require("do_layer_norm_before", True)
    config.require("_remove_final_layer_norm", False)
    config.require("word_embed_proj_dim", config.integer("hidden_size"))
    config.pass_over("dropout", "activation_dropout", "layerdrop", "init_std")
    spec = plain_spec(config, "opt", _SPELLING, activation="relu", bias=config.flag("enable_bias", True))
    return replace(spec, learned_positions=True)


def refs(spec: ModelSpec) -> Refs:
    """Name OPT's tensors."""
    body = "model.decoder."
    refs = standard_refs(
        spec, _NAMES, prefix=f"{body}layers.", embed=f"{body}embed_tokens", norm=f"{body}final_layer_norm"
    )
    n_stored = spec.max_positions + _N_UNUSED
    refs["positions"] = TensorRef(f"{body}embed_positions.weight", start=_N_UNUSED, n_stored=n_stored)
    return refs


FAMILY = Family("OPTForCausalLM", "opt", read_spec, refs, spelling=_SPELLING)
