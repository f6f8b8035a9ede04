"""Writes the model in Hugging Face's layout: `config.json`, `generation_config.json`, `model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from trainer.config import ModelShape
from trainer.tokenizer import END_OF_TEXT, END_OF_TURN, token_id


def hf_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `config.json` of a `LlamaForCausalLM` of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": stop_tokens(tokenizer),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
    }


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids that end a generation: end of turn, end of text."""
    return [token_id(tokenizer, token) for token in (END_OF_TURN, END_OF_TEXT)]


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape written in a `config.json`."""
    return ModelShape(
        hidden_size=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )


def export_model(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    tokenizer: Tokenizer,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes config and weights to `out`. The weights file is replaced whole, so a reader never sees half of it."""
    generation = {
        "bos_token_id": token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": stop_tokens(tokenizer),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "max_new_tokens": 256,
    }
    _write_json(out / "config.json", hf_config(shape, tokenizer))
    _write_json(out / "generation_config.json", generation)
    tensors = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in weights.items()}
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    # The writer creates it for its owner alone; images and other users read this file too.
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")


def load_exported(folder: Path) -> tuple[ModelShape, dict[str, Tensor]]:
    """Shape and fp32 weights of an exported model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    return shape_from_config(config), {name: tensor.float() for name, tensor in weights.items()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
