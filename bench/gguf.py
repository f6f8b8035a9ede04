"""Writes a benchmark checkpoint as GGUF, so that llama.cpp runs the same bf16 weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors import safe_open

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, out: Path) -> Path:
    """Convert a folder written by `make_checkpoint`; return `out`."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    _write_facts(writer, config)
    _write_tokenizer(writer, checkpoint)
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a dict
            _write_tensor(writer, name.removesuffix(".weight"), tensors.get_tensor(name), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _write_facts(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in ("<s>", "</s>") else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{tokens[2]} {tokens[3]}"])  # the reader refuses an empty list; this pair never occurs
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, config: dict) -> None:
    if name in _TOP_NAMES:
        target = _TOP_NAMES[name]
    else:
        _, _, layer, part = name.split(".", 3)
        target = f"blk.{layer}.{_LAYER_NAMES[part]}"
        if part.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"]
            tensor = _interleave_rotary(tensor, heads)
    if tensor.dim() == 1:
        writer.add_tensor(f"{target}.weight", tensor.float().numpy())
    else:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(f"{target}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleave_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from halves (Hugging Face) to pairs (llama.cpp): [n_heads * head_dim, hidden]."""
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)
