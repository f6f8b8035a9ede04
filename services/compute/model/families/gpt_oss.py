"""gpt-oss: attention sinks, alternating windows, experts with biases behind a clamped gate, stored in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.rope import fill_rope
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(router="mlp.router")
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_spec(config: Config) -> ModelSpec:
    """Read a gpt-oss config.json. Raises ModelError."""
    config.require("hidden_act", "silu")
    config.require("swiglu_alpha", 1.702)
    config.require("swiglu_limit", 7.0)
    config.pass_over("initial_context_length", "experts_per_token")  # repeat other keys
    config.fill("head_dim", 64)
    fill_rope(config, _ROPE)
    spec = base_spec(config, "gpt_oss", norm_eps=1e-5, theta=150_000.0, attention_bias=True)
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=True)
    moe = replace(moe, bias=True)
    default = [FULL if index % 2 else SLIDING for index in range(spec.n_layers)]
    layers = with_windows(config, spec, read_layer_types(config, spec.n_layers, default))
    return replace(
        spec,
        layers=tuple(replace(layer, moe=moe) for layer in layers),
        activation="clamped_silu",
        sinks=True,
    )


def refs(spec: ModelSpec) -> Refs:
    """Name gpt-oss's tensors: the experts of a layer are stacked, rows of gate and up alternate.

    Unquantized matrices are stored [in, out].
    """
    refs = standard_refs(spec, _NAMES)
    for index, layer in enumerate(spec.layers):
        assert layer.moe is not None
        key, module, n = f"layers.{index}.", f"model.layers.{index}.", layer.moe.n_experts
        refs[f"{key}sinks"] = TensorRef(f"{module}self_attn.sinks")
        if layer.moe.bias:
            refs[f"{key}router.bias"] = TensorRef(f"{module}{_NAMES.router}.bias")
        for expert in range(n):
            for name, part in (("gate", 0), ("up", 1), ("down", None)):
                stored = f"{module}mlp.experts.{'down' if part is None else 'gate_up'}_proj"
                ref = TensorRef(stored, transposed=True, place=expert, n_stacked=n)
                ref = ref if part is None else replace(ref, unit=1, part=part, n_parts=2)
                refs[f"{key}experts.{expert}.{name}"] = ref
                if layer.moe.bias:
                    refs[f"{key}experts.{expert}.{name}.bias"] = replace(ref, name=f"{stored}_bias", transposed=False)
    return refs


FAMILY = Family("GptOssForCausalLM", "gpt_oss", read_spec, refs, stacked=None)
