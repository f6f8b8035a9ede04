"""Nemotron-H: layers that are a state-space layer (Mamba 2), attention without a rope, an MLP or experts alone."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import ACTIVATIONS, base_spec, read_moe
from services.compute.model.families.mixtures import read_grouped_routing
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.statespace import ATTENTION, STATE, read_mamba2, with_mamba2
from services.compute.model.spec import LayerSpec, ModelSpec, MoeSpec

_SPELLING = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_NAMES = LayerNames(
    **{part: f"mixer.{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")},
    attn_norm="norm",
    mlp_norm="norm",
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    shared="mixer.shared_experts",
    experts="mixer.experts",
)
_PATTERN = {"M": STATE[0], "*": ATTENTION[0], "-": "mlp", "E": "moe"}
# Settings of draft layers, and those of mixtures, which `_read_mixture` reads where a layer is one.
_UNUSED = (
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "time_step_min", "mamba_hidden_act", "hidden_act"),
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group"),
    *("topk_group", "norm_topk_prob", "layer_norm_epsilon", "sliding_window", "rope_theta", "rope_parameters"),
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Nemotron-H config.json. Raises ModelError."""
    config.fill_spelled(_SPELLING)
    config.fill("mamba_n_groups", 8)
    config.fill("head_dim", config.raw("attention_head_dim"))
    config.override("mamba_proj_bias", config.flag("use_bias", False))
    config.require("mamba_hidden_act", "silu")
    config.require("sliding_window")
    kinds = _kinds(config)
    config.fill("num_hidden_layers", len(kinds))
    if config.integer("num_hidden_layers") != len(kinds):
        raise config.error("num_hidden_layers", f"expected {len(kinds)}, as many as kinds of layers")
    config.fill("rms_norm_eps", config.number("layer_norm_epsilon", 1e-5))
    config.pass_over(*_UNUSED)
    spec = base_spec(config, "nemotron_h")
    mixer = read_mamba2(config, spec.hidden_size, least_step=config.number("time_step_min", 0.001))
    of_kind = {
        "mlp": LayerSpec(attends=False),
        "moe": LayerSpec(attends=False, moe=_read_mixture(config) if "moe" in kinds else None),
        **dict.fromkeys(ATTENTION, LayerSpec(has_mlp=False)),
        **dict.fromkeys(STATE, LayerSpec(attends=False, has_mlp=False, mixer=mixer)),
    }
    return replace(
        spec,
        layers=tuple(of_kind[kind] for kind in kinds),
        mlp="plain",
        activation=config.choice("mlp_hidden_act", ACTIVATIONS, "relu2"),
        mlp_bias=config.flag("mlp_bias", False),
    )


def _read_mixture(config: Config) -> MoeSpec:
    """Return the mixture, whose experts have no gate. Raises ModelError."""
    config.require("moe_latent_size")
    config.require("n_shared_experts", 1)
    config.require("mlp_bias", False)
    config.fill("num_experts_per_tok", 2)
    routing = read_grouped_routing(config, normalise=True)
    moe = read_moe(config, "n_routed_experts", ffn_size=config.integer("moe_intermediate_size"), normalise=True)
    return replace(moe, routing=routing, shared_size=config.integer("moe_shared_expert_intermediate_size"))


def _kinds(config: Config) -> list[str]:
    """Return the kind of every layer. Raises ModelError."""
    key = config.first_of("layers_block_type", "layer_types", "hybrid_override_pattern")
    for other in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        config.raw(other)
    kinds = config.raw(key)
    if isinstance(kinds, str):
        kinds = [_PATTERN.get(letter, letter) for letter in kinds]
    known = ("mlp", "moe", *ATTENTION, *STATE)
    if not isinstance(kinds, list) or not kinds or any(kind not in known for kind in kinds):
        unknown = sorted({str(kind) for kind in kinds if kind not in known}) if isinstance(kinds, list) else kinds
        raise config.error(key, f"expected layers of {', '.join(known)}, found {unknown!r}")
    return kinds


def refs(spec: ModelSpec) -> Refs:
    """Name Nemotron-H's tensors."""
    stack = {"prefix": "backbone.layers.", "embed": "backbone.embeddings", "norm": "backbone.norm_f"}
    return with_mamba2(spec, standard_refs(spec, _NAMES, **stack), "backbone.layers.{}.mixer.")


FAMILY = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    read_spec,
    refs,
    optional_prefix="backbone.",
    prefixes=(("model.", "backbone."),),
    spelling=_SPELLING,
    stacked=None,
)
