"""Mamba 2: state-space layers and nothing else; the memory of a text does not grow with its length."""

from __future__ import annotations

from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import read_dtype, read_eos
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.statespace import read_mamba2, with_mamba2
from services.compute.model.spec import LayerSpec, ModelSpec

_SPELLING = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_POSITIONS = 131_072  # a state has no largest position; tables of tokens have


def read_spec(config: Config) -> ModelSpec:
    """Read a Mamba 2 config.json. Raises ModelError."""
    for key, spelled in _SPELLING.items():
        config.fill(key, config.raw(spelled))
    config.fill("mamba_n_groups", 8)
    config.fill("mamba_d_state", 128)
    config.require("hidden_act", "silu")
    hidden_size = config.integer("hidden_size")
    config.pass_over("norm_before_gate", "rms_norm", "time_step_min")
    layer = LayerSpec(attends=False, has_mlp=False, mixer=read_mamba2(config, hidden_size))
    return ModelSpec(
        family="mamba2",
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=0,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        max_positions=_POSITIONS,
        layers=(layer,) * config.integer("num_hidden_layers", at_most=MAX_LAYERS),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied=config.flag("tie_word_embeddings", False),
        eos_token_ids=read_eos(config),
    )


def refs(spec: ModelSpec) -> Refs:
    """Name Mamba 2's tensors."""
    names = LayerNames(attn_norm="norm")
    stack = {"prefix": "backbone.layers.", "embed": "backbone.embeddings", "norm": "backbone.norm_f"}
    return with_mamba2(spec, standard_refs(spec, names, **stack), "backbone.layers.{}.mixer.")


FAMILY = Family(
    "Mamba2ForCausalLM",
    "mamba2",
    read_spec,
    refs,
    optional_prefix="backbone.",
    prefixes=(("backbone.embedding.", "backbone.embeddings."),),
    spelling=_SPELLING,
)
