"""GPT BigCode (StarCoder 1, SantaCoder): GPT-2 with one KV head for all, as published."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import by_kv_head, concatenated, in_layers
from services.compute.model.families.gpt2 import body_refs
from services.compute.model.families.naming import UNUSED, Family, Refs
from services.compute.model.families.plain import GPT_SPELLING, plain_spec
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT BigCode config.json. Raises ModelError."""
    # How its program computes, and how the checkpoint was trained.
    config.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "runner_max_sequence_length")
    config.pass_over("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "pad_key_length")
    n_kv_heads = 1 if config.flag("multi_query", True) else None
    config.pass_over("num_key_value_heads")  # follows from multi_query
    spec = plain_spec(config, "gpt_bigcode", GPT_SPELLING, activation="gelu_pytorch_tanh", n_kv_heads=n_kv_heads)
    scale = spec.attention_scale if config.flag("scale_attn_weights", True) else 1.0
    return replace(spec, learned_positions=True, attention_scale=scale)


def refs(spec: ModelSpec) -> Refs:
    """Name GPT BigCode's tensors: q, k and v one after the other, or side by side for each head."""
    sizes = {"q": spec.hidden_size, "k": spec.head_dim, "v": spec.head_dim}

    def fused(index: int) -> Refs:
        stored = f"transformer.h.{index}.attn.c_attn"
        return concatenated(stored, sizes, bias=True) if spec.n_kv_heads == 1 else by_kv_head(stored, spec)

    return body_refs(spec) | in_layers(spec, fused)


FAMILY = Family(
    "GPTBigCodeForCausalLM",
    "gpt_bigcode",
    read_spec,
    refs,
    (*UNUSED, "*.attn.bias", "*.attn.masked_bias"),
    optional_prefix="transformer.",
    spelling=GPT_SPELLING | {"num_key_value_heads": "multi_query"},
)
