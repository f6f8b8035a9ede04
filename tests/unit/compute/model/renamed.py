"""Checkpoints of models that transformers does not hold: a model of the same mathematics with the published names.

InternLM 2: huggingface.co/internlm/internlm2-7b, modeling_internlm2.py (`wqkv` is "(h gs d)", with gs = q heads of a KV
head, k, v). InternLM 3: internlm3-8b-instruct, modeling_internlm3.py. MiniCPM: openbmb/MiniCPM-2B-sft-bf16,
modeling_minicpm.py (scale_emb, scale_depth / sqrt(layers), hidden_size / dim_model_base).
"""

from __future__ import annotations

import math
from typing import Any

import torch

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def internlm2(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Llama's mathematics: q, k and v in one tensor, ordered by KV head."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    stored = _renamed({name: tensor for name, tensor in tensors.items() if ".self_attn." not in name}, names)
    stored |= _renamed({name: tensor for name, tensor in tensors.items() if "o_proj" in name}, names)
    n_kv, head_dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    for index in range(config["num_hidden_layers"]):
        parts = [tensors[f"model.layers.{index}.self_attn.{part}_proj.weight"] for part in "qkv"]
        by_head = [part.view(n_kv, -1, head_dim, part.shape[1]) for part in parts]  # [n_kv, heads, head_dim, hidden]
        stored[f"model.layers.{index}.attention.wqkv.weight"] = torch.cat(by_head, dim=1).flatten(0, 2)
    return _as(config, "InternLM2ForCausalLM", "internlm2", bias=False), stored


def internlm3(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Llama's mathematics with other names of the biases."""
    return _as(config, "InternLM3ForCausalLM", "internlm3", bias=True, qkv_bias=True), tensors


def minicpm(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Granite's mathematics with other names of the multipliers."""
    multipliers = {
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * math.sqrt(config["num_hidden_layers"]),
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
    }
    return _as(config, "MiniCPMForCausalLM", "minicpm", **multipliers), tensors


def kimi_linear(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """The publisher's config.json, and its name of the MLP without experts; transformers saves one name for both."""
    kinds, sizes = config.pop("layer_types"), ("head_dim", "num_heads")
    section: Json = {key: config.pop(f"linear_{key}") for key in sizes}
    section["short_conv_kernel_size"] = config.pop("linear_conv_kernel_dim")
    for key, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
        section[key] = [index for index, other in enumerate(kinds, 1) if other == kind]
    mlps = config.pop("mlp_layer_types")
    names = {f"layers.{index}.block_sparse_moe": f"layers.{index}.mlp" for index in range(mlps.count("dense"))}
    published = {"first_k_dense_replace": mlps.count("dense"), "mla_use_nope": True, "head_dim": 72}
    return config | published | {"linear_attn_config": section}, _renamed(tensors, names)


_OTHERS = ("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def _as(config: Json, architecture: str, model_type: str, **settings: Any) -> Json:
    """Return `config` in the spelling of another architecture."""
    remaining = {key: value for key, value in config.items() if key not in (*_OTHERS, "attention_multiplier")}
    return remaining | {"architectures": [architecture], "model_type": model_type} | settings


def _renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    def stored(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if old in name), name)

    return {stored(name): tensor for name, tensor in tensors.items()}
