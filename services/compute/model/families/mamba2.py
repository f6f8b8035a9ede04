"""Mamba 2: state-space layers and nothing else; the memory of a text does not grow with its length."""

from __future__ import annotations

from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import read_dtype, read_eos
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.statespace import read_mamba2, with_mamba2
from services.compute.model.mixers import Mixer
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
    config.fill_spelled(_SPELLING)
    config.fill("mamba_n_groups", 8)
    config.fill("mamba_d_state", 128)
    config.pass_over("norm_before_gate", "rms_norm", "time_step_min", "time_step_init_scheme", "time_step_scale")
    config.pass_over("emb_initializer_range", "conv_initializer_range", "A_initializer_range", "intermediate_size")
    return state_spaces(config, "mamba2", read_mamba2(config, config.integer("hidden_size")))


def state_spaces(config: Config, family: str, mixer: Mixer, *, tied: bool = False) -> ModelSpec:
    """Return a model of layers with `mixer` and nothing else; `tied` is the default. Raises ModelError."""
    config.require("hidden_act", "silu")
    layer = LayerSpec(attends=False, has_mlp=False, mixer=mixer)
    return ModelSpec(
        family=family,
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        ffn_size=0,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        max_positions=_POSITIONS,
        layers=(layer,) * config.integer("num_hidden_layers", at_most=MAX_LAYERS),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied=config.flag("tie_word_embeddings", tied),
        eos_token_ids=read_eos(config),
    )


def state_space_refs(spec: ModelSpec) -> Refs:
    """Name the tensors that such models share."""
    stack = {"prefix": "backbone.layers.", "embed": "backbone.embeddings", "norm": "backbone.norm_f"}
    return standard_refs(spec, LayerNames(attn_norm="norm"), **stack)


def refs(spec: ModelSpec) -> Refs:
    """Name Mamba 2's tensors."""
    return with_mamba2(spec, state_space_refs(spec), "backbone.layers.{}.mixer.")


PREFIXES = (("backbone.embedding.", "backbone.embeddings."),)
FAMILY = Family(
    "Mamba2ForCausalLM", "mamba2", read_spec, refs, optional_prefix="backbone.", prefixes=PREFIXES, spelling=_SPELLING
)
