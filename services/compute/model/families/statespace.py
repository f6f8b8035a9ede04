"""State-space layers of a config.json and of a checkpoint, as Bamba spells them."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.naming import Refs, TensorRef, linear_refs
from services.compute.model.families.windows import read_kinds
from services.compute.model.mixers import Mamba2
from services.compute.model.spec import LayerSpec, ModelSpec

ATTENTION, STATE = ("attention", "full_attention"), ("mamba", "linear_attention", "mamba2")
_UNUSED = (
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "residual_in_fp32", "rescale_prenorm_residual"),
    *("time_step_floor", "time_step_max", "mamba_dt_max", "mamba_dt_min", "mamba_dt_init_floor", "mamba_expand"),
    *("expand", "z_loss_coefficient", "mamba_ssm_cache_dtype", "time_step_rank", "mamba_d_ssm"),
)
_INFINITIES = (float("inf"), {"__float__": "Infinity"})  # the latter as transformers 5 writes it


def read_mamba2(config: Config, hidden_size: int, *, least_step: float = 0.0) -> Mamba2:
    """Return the state-space layer that all layers share. Raises ModelError."""
    config.pass_over(*_UNUSED)
    _refuse_limits(config, least_step)
    n_heads, n_groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    if n_heads % n_groups:
        raise config.error("mamba_n_groups", f"expected a divisor of mamba_n_heads {n_heads}, found {n_groups}")
    auto = config.raw("mamba_d_head") in (None, "auto")
    expand = config.integer("mamba_expand", 2)
    head_dim = expand * hidden_size // n_heads if auto else config.integer("mamba_d_head")
    return Mamba2(
        n_heads,
        head_dim,
        n_groups,
        config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        least_step=least_step,
    )


def _refuse_limits(config: Config, least_step: float) -> None:
    """Raise ModelError for limits of time steps that change what is computed."""
    limit = config.raw("time_step_limit")
    if limit is None:
        return
    low, high = limit if isinstance(limit, list | tuple) and len(limit) == 2 else (None, None)
    if low not in (0, least_step) or high not in _INFINITIES:
        raise config.error("time_step_limit", f"expected [0.0, Infinity], found {limit!r}")


def mixed_layers(config: Config, spec: ModelSpec, mixer: Mamba2, default: object = None) -> tuple[LayerSpec, ...]:
    """Return the layers, with `mixer` in place of attention where they are of such a kind. Raises ModelError."""
    kinds = read_kinds(config, spec.n_layers, (*ATTENTION, *STATE), default)
    return tuple(
        layer if kind in ATTENTION else replace(layer, rope=None, attends=False, mixer=mixer)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )


def with_mamba2(spec: ModelSpec, refs: Refs, module: str) -> Refs:
    """Return `refs` with the state-space layers' tensors; `module` has the layer's number in place of {}."""
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, Mamba2):
            refs |= mamba2_refs(layer.mixer, f"layers.{index}.", module.format(index))
    return refs


def mamba2_refs(mixer: Mamba2, key: str, module: str) -> Refs:
    """Return the references of the state-space layer with the keys' prefix `key`, stored as `module`."""
    states = mixer.n_groups * mixer.n_states
    sizes = {"z": mixer.size, "x": mixer.size, "b": states, "c": states, "dt": mixer.n_heads}
    refs: Refs = {}
    start, n_stored = 0, sum(sizes.values())
    for part, size in sizes.items():
        refs[f"{key}ssm_{part}"] = TensorRef(f"{module}in_proj.weight", start=start, n_stored=n_stored)
        if mixer.bias:
            refs[f"{key}ssm_{part}.bias"] = TensorRef(f"{module}in_proj.bias", start=start, n_stored=n_stored)
        start += size
    start, n_stored = 0, mixer.channels(1)
    for part in "xbc":
        refs[f"{key}filter_{part}"] = TensorRef(f"{module}conv1d.weight", start=start, n_stored=n_stored, filtered=True)
        if mixer.conv_bias:
            refs[f"{key}filter_{part}.bias"] = TensorRef(f"{module}conv1d.bias", start=start, n_stored=n_stored)
        start += sizes[part]
    refs[f"{key}ssm_a"] = TensorRef(f"{module}A_log")
    refs[f"{key}ssm_step"] = TensorRef(f"{module}dt_bias")
    refs[f"{key}ssm_skip"] = TensorRef(f"{module}D")
    if mixer.gate != "plain":
        refs[f"{key}ssm_norm"] = TensorRef(f"{module}norm.weight")
    return refs | linear_refs(f"{key}ssm_out", f"{module}out_proj", mixer.bias)
