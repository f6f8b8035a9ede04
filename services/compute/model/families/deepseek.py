"""DeepSeek 2, 3 and models of their form (Kimi K2): latent attention, experts in groups and shared ones."""

from __future__ import annotations

import math
from dataclasses import replace

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.mixtures import read_groups, with_experts, with_grouped_experts
from services.compute.model.families.naming import Family, Refs, TensorRef, standard_refs
from services.compute.model.families.rope import read_ropes, yarn_multiplier
from services.compute.model.spec import LatentSpec, ModelSpec


def read_deepseek2(config: Config) -> ModelSpec:
    """Read a DeepSeek 2 config.json. Raises ModelError."""
    spec = with_latents(config, "deepseek_v2")
    config.require("scoring_func", "softmax")
    config.require("norm_topk_prob", False)
    config.require("topk_method", "greedy", "group_limited_greedy")
    n_active, scale = config.integer("num_experts_per_tok"), config.number("routed_scaling_factor", 1.0)
    n_groups = n_kept = 1
    if config.raw("topk_method") == "group_limited_greedy":
        n_groups, n_kept = read_groups(config)
    config.pass_over("n_group", "topk_group")
    routing = ExpertRouting(n_active, False, n_groups=n_groups, n_kept_groups=n_kept, scale=scale)
    return replace(spec, layers=with_experts(config, spec, routing, dense=0))


def read_deepseek3(config: Config) -> ModelSpec:
    """Read a DeepSeek 3 config.json. Raises ModelError."""
    config.fill_absent(routed_scaling_factor=2.5, n_group=8, topk_group=4)
    spec = with_latents(config, "deepseek_v3")
    return replace(spec, layers=with_grouped_experts(config, spec, dense=3, normalise=True))


def with_latents(config: Config, family: str) -> ModelSpec:
    """Return the spec of a model with latent attention in all layers. Raises ModelError."""
    rope_dim = config.integer("qk_rope_head_dim")
    _check_repeated(config, "head_dim", rope_dim, "qk_rope_head_dim")
    config.fill("head_dim", rope_dim)
    config.require("rope_interleave", True)
    spec = base_spec(config, family, ropes=read_ropes(config, rope_dim))
    _check_repeated(config, "num_key_value_heads", spec.n_heads, "num_attention_heads")
    latent = LatentSpec(
        rank=config.integer("kv_lora_rank"),
        query_rank=0 if config.raw("q_lora_rank") is None else config.integer("q_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
    )
    _check_repeated(config, "qk_head_dim", latent.query_dim, "qk_nope_head_dim + qk_rope_head_dim")
    scale = yarn_multiplier(config) / math.sqrt(latent.query_dim)
    return replace(spec, n_kv_heads=1, head_dim=latent.rank + rope_dim, latent=latent, attention_scale=scale)


def _check_repeated(config: Config, key: str, value: int, first_keys: str) -> None:
    """Raise ModelError if `key` is there and is not the `value` of the keys `first_keys`."""
    repeated = config.raw(key)
    if repeated is not None and repeated != value:
        raise config.error(key, f"expected {first_keys} {value}, found {repeated!r}")


def refs(spec: ModelSpec) -> Refs:
    """Name the tensors; the rotated parts of queries and of the key are stored in pairs."""
    return latent_refs(spec, standard_refs(spec))


def latent_refs(spec: ModelSpec, refs: Refs) -> Refs:
    """Return `refs` with those of latent attention in the layers that attend."""
    sizes = spec.latent
    assert sizes is not None
    for index in (index for index, layer in enumerate(spec.layers) if layer.attends):
        key, module = f"layers.{index}.", f"model.layers.{index}.self_attn."
        for part in ("k", "v"):
            del refs[key + part]
        refs[f"{key}q"] = TensorRef(
            f"{module}{'q_b_proj' if sizes.query_rank else 'q_proj'}.weight",
            unit=sizes.query_dim,
            first_paired=sizes.nope_dim,
            n_paired=sizes.rope_dim,
        )
        if sizes.query_rank:
            refs[f"{key}q_latent"] = TensorRef(f"{module}q_a_proj.weight")
            refs[f"{key}q_latent_norm"] = TensorRef(f"{module}q_a_layernorm.weight")
        refs[f"{key}kv_latent"] = TensorRef(
            f"{module}kv_a_proj_with_mqa.weight",
            unit=sizes.rank + sizes.rope_dim,
            first_paired=sizes.rank,
            n_paired=sizes.rope_dim,
        )
        refs[f"{key}kv_latent_norm"] = TensorRef(f"{module}kv_a_layernorm.weight")
        refs[f"{key}kv_heads"] = TensorRef(f"{module}kv_b_proj.weight")
    return refs


DEEPSEEK2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", read_deepseek2, refs)
DEEPSEEK3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek3, refs)
