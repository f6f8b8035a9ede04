"""Makes a Llama checkpoint of a named shape with random weights and a byte-level tokenizer.

    python -m bench.make_checkpoint 100m /tmp/llama-100m

Speed depends on the shape, not on the values of weights. The tokenizer has the shape's vocabulary size, so that every
server accepts both text and token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAX_POSITIONS = 32_768


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    head_dim: int


SHAPES = {
    "15m": Shape(384, 8, 6, 2, 1024, 8_192, False, 64),
    "100m": Shape(768, 12, 12, 4, 2048, 32_000, False, 64),
    "135m": Shape(576, 30, 9, 3, 1536, 49_152, True, 64),  # SmolLM2
    "0.5b": Shape(896, 24, 14, 2, 4864, 151_936, True, 64),
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, True, 64),
    "8b": Shape(4096, 32, 32, 8, 14336, 128_256, False, 128),
}


def config_of(shape: Shape) -> dict[str, object]:
    """The `config.json` of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def random_tensors(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, bf16, scaled so that activations stay finite."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden).bfloat16(),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in sizes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(shape.hidden).bfloat16()
    return tensors


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with every byte and enough unused words to fill the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merge = (alphabet[-2], alphabet[-1])  # GGUF has no byte-level BPE without merges; texts have no such control bytes
    tokens = ["<s>", "</s>", *alphabet, "".join(merge)]
    tokens += [f"unused{index}" for index in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[merge]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_checkpoint(shape: Shape, out: Path) -> None:
    """Write config, weights and tokenizer files to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    save_file(random_tensors(shape), out / "model.safetensors", metadata={"format": "pt"})
    byte_level_tokenizer(shape.vocab).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": MAX_POSITIONS,
                "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
            },
            indent=2,
        )
    )


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Write a random checkpoint of SHAPE to OUT."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"unknown shape {shape}: one of {', '.join(SHAPES)}")
    write_checkpoint(SHAPES[shape], out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    typer.run(main)
