"""Hunyuan V1 (dense): q and k are normalised after the rope, whose base a fixed factor stretches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, one_rope
from services.compute.model.families.naming import Family, LayerNames, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.spec import ModelSpec, RopeSpec

_LARGEST = 1e12  # limit of theta and its factor, which keeps their powers finite
_NAMES = LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def read_spec(config: Config) -> ModelSpec:
    """Read a Hunyuan V1 config.json. Raises ModelError."""
    config.require("use_qk_norm", True)
    config.require("use_rotary_pos_emb", True)
    config.require("norm_type", "rms")
    config.require("num_experts", 1)
    for key in ("use_cla", "use_mla", "position_embedding_xdrope", "add_classification_head"):
        config.require(key, False)
    config.require("attention_head_dim", config.raw("head_dim"))
    config.pass_over("pretraining_tp", "cla_share_factor", "org_vocab_size", "class_num", "dense_list", "pool_type")
    config.pass_over(*(f"{token}_id" for token in ("pad", "eod_token", "image_token", "mask_init", "im_newline")))
    config.pass_over(*(f"{mode}_{edge}_id" for mode in ("im", "text", "video") for edge in ("start", "end")))
    ropes = {"": _read_rope(config)}
    spec = base_spec(config, "hunyuan_v1_dense", norm_eps=1e-5, ropes=ropes, attention_bias=False)
    return replace(spec, qk_norm="head", qk_norm_rotated=True)


def _read_rope(config: Config) -> RopeSpec:
    """Return the rope; "dynamic" with `alpha` means theta * alpha^(d / (d - 2)) at every length."""
    given = config.raw("head_dim") is not None
    head_dim = config.integer("head_dim") if given else config.quotient("hidden_size", "num_attention_heads")
    key = config.first_of("rope_scaling", "rope_parameters")
    settings = config.raw(key)
    if not isinstance(settings, dict) or settings.get("alpha") is None:
        return one_rope(config, read_ropes(config, head_dim))
    if head_dim <= 2 or head_dim % 2:
        raise config.error("head_dim", f"expected an even number above 2, found {head_dim}")
    values = config.section(key)
    for name in ("rope_type", "type"):
        values.require(name, "dynamic")
    values.require("factor", 1)
    values.pass_over("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # settings of other kinds
    theta = (values if values.raw("rope_theta") is not None else config).number("rope_theta", 10_000.0)
    alpha = values.number("alpha")
    if max(theta, alpha) > _LARGEST:
        raise values.error(
            "alpha", f"expected numbers up to {_LARGEST:g}, found alpha {alpha:g} and rope_theta {theta:g}"
        )
    return RopeSpec(theta * alpha ** (head_dim / (head_dim - 2)), head_dim)


FAMILY = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    read_spec,
    partial(standard_refs, names=_NAMES),
    base="HunYuanDenseV1Model",
)
