"""Tiny random checkpoints whose inputs are divided by groups of 32, with a tokenizer of bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.tools.quantizer.run import QuantizationOptions
from tests.unit.compute.model.harness import CPU, CachedDecoder, lone_rank
from tests.unit.compute.model.zoo import make, write_checkpoint

_SHAPE = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
IDS = list(range(5, 255, 6))


def write_model(folder: Path, config: str, **settings: Any) -> Path:
    """Write a model of transformers' class `config`."""
    shape = {} if config == "GPT2Config" else _SHAPE
    write_checkpoint(make(config, **{**shape, **settings})(), folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index + 4 for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def request(model: Path, out: Path, **changed: Any) -> QuantizationOptions:
    """A request for a few short pieces of text."""
    return replace(QuantizationOptions(model, out, "gptq", 4, None, 0.0, True, None, 6, 48), **changed)


def our_logits(folder: Path) -> Tensor:
    """Our worker's logits of `IDS`: [n, vocab_size]."""
    rank = lone_rank()
    model = load_model(describe(folder), rank, open_backend(torch.float32, CPU))
    return model.logits(CachedDecoder(model, rank).run(IDS, []))[:, : model.spec.vocab_size]


def their_logits(folder: Path, **options: Any) -> Tensor:
    """The logits of transformers for `IDS`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float()
