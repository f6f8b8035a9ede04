"""Mamba and Falcon Mamba: state-space layers with a decay for each number of a channel's state, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from services.compute.model.families.config import Config
from services.compute.model.families.mamba2 import PREFIXES, state_space_refs, state_spaces
from services.compute.model.families.naming import Family, Refs, TensorRef, linear_refs
from services.compute.model.mixers import Mamba
from services.compute.model.spec import ModelSpec

_SPELLING = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_rank": "time_step_rank",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
# Settings of the training and of other programs, and a key that repeats others.
_UNUSED = (
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor"),
    *("rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan", "use_falcon_mambapy"),
    *("use_mamba_kernels", "intermediate_size", "d_inner", "d_model", "n_layer", "ssm_cfg", "fused_add_norm"),
    *("pad_vocab_size_multiple", "rms_norm"),
)


def read_mamba(config: Config) -> Mamba:
    """Return the state-space layer that all layers share. Raises ModelError."""
    config.pass_over(*_UNUSED)
    hidden_size = config.integer("hidden_size")
    auto = config.raw("mamba_dt_rank") in (None, "auto")
    return Mamba(
        config.integer("mamba_expand", 2) * hidden_size,
        config.integer("mamba_d_state", 16),
        ceil(hidden_size / 16) if auto else config.integer("mamba_dt_rank"),
        config.integer("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )


def _read(config: Config) -> Mamba:
    config.fill_spelled(_SPELLING)
    return read_mamba(config)


def read_spec(config: Config) -> ModelSpec:
    """Read a Mamba config.json. Raises ModelError."""
    return state_spaces(config, "mamba", _read(config), tied=True)


def with_mamba(spec: ModelSpec, refs: Refs, module: str) -> Refs:
    """Return `refs` with the state-space layers' tensors; `module` has the layer's number in place of {}."""
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, Mamba):
            refs |= _mamba_refs(layer.mixer, f"layers.{index}.", module.format(index))
    return refs


def _mamba_refs(mixer: Mamba, key: str, module: str) -> Refs:
    refs: Refs = {}
    for part, start in (("x", 0), ("z", mixer.size)):
        refs[f"{key}ssm_{part}"] = TensorRef(f"{module}in_proj.weight", start=start, n_stored=2 * mixer.size)
        if mixer.bias:
            refs[f"{key}ssm_{part}.bias"] = TensorRef(f"{module}in_proj.bias", start=start, n_stored=2 * mixer.size)
    refs[f"{key}filter"] = TensorRef(f"{module}conv1d.weight", filtered=True)
    if mixer.conv_bias:
        refs[f"{key}filter.bias"] = TensorRef(f"{module}conv1d.bias")
    refs |= {f"{key}rates": TensorRef(f"{module}A_log"), f"{key}ssm_skip": TensorRef(f"{module}D")}
    refs[f"{key}ssm_select"] = TensorRef(f"{module}x_proj.weight")
    refs |= linear_refs(f"{key}ssm_dt", f"{module}dt_proj", bias=True)
    if mixer.norms == "weighted":
        names = {"step_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm"}
        refs |= {key + part: TensorRef(f"{module}{name}.weight") for part, name in names.items()}
    return refs | linear_refs(f"{key}ssm_out", f"{module}out_proj", mixer.bias)


def refs(spec: ModelSpec) -> Refs:
    """Name Mamba's tensors."""
    return with_mamba(spec, state_space_refs(spec), "backbone.layers.{}.mixer.")


def read_falcon(config: Config) -> ModelSpec:
    """Read a Falcon Mamba config.json: b, c and the steps' numbers are normalised. Raises ModelError."""
    mixer = replace(_read(config), norms="unit", norm_eps=config.number("mixer_rms_eps", 1e-6))
    return state_spaces(config, "falcon_mamba", mixer, tied=True)


MAMBA = Family(
    "MambaForCausalLM", "mamba", read_spec, refs, optional_prefix="backbone.", prefixes=PREFIXES, spelling=_SPELLING
)
FALCON_MAMBA = Family(
    "FalconMambaForCausalLM",
    "falcon_mamba",
    read_falcon,
    refs,
    optional_prefix="backbone.",
    prefixes=PREFIXES,
    spelling=_SPELLING,
)
