"""Whole decoders in bfloat16: by our kernels as close to exact arithmetic as by torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.compute.backends.base import Attention
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cpu.attention import PagedAmx, PagedVectors
from services.compute.backends.cpu.backend import KernelBackend, OneDnnBackend
from services.compute.backends.shapes import AttentionShape
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from tests.unit.compute.model.harness import CachedDecoder
from tests.unit.compute.model.zoo import prompt, reference_logits, write_checkpoint

N_TOKENS = 150
_SHAPE: dict[str, Any] = {"vocab_size": 203, "num_hidden_layers": 3, "max_position_embeddings": 256}
_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}


def _config(name: str, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> transformers.PretrainedConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads}
    if name != "GPTNeoXConfig":
        sizes["num_key_value_heads"] = kv
    return getattr(transformers, name)(**{**_SHAPE, **sizes, **more})


# Sizes that are no multiples of 32 or 64 are among them: the kernels' tiles are.
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "biased": lambda: _config("LlamaConfig", 96, 200, 3, 1, attention_bias=True, mlp_bias=True),
    "window": lambda: _config("MistralConfig", 80, 176, 5, 1, head_dim=96, sliding_window=40),
    "qk_norm": lambda: _config("Qwen3Config", 128, 250, 4, 2, head_dim=64),
    "full_qk_norm": lambda: _config("Olmo2Config", 128, 256, 4, 4),
    "softcap_gelu_tanh": lambda: _config(
        "Gemma2Config", 128, 256, 4, 2, **_SLIDES, head_dim=128, attn_logit_softcapping=5.0, query_pre_attn_scalar=64
    ),
    "gelu_tanh_qk_norm": lambda: _config("Gemma3TextConfig", 96, 176, 2, 1, **_SLIDES, head_dim=256),
    "experts": lambda: _config("MixtralConfig", 128, 144, 4, 2, num_experts_per_tok=2, num_local_experts=4),
    "scales": lambda: _config(
        "GraniteConfig", 128, 250, 4, 2, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2
    ),
    "partial_rotary_parallel": lambda: _config(
        "GPTNeoXConfig",
        128,
        250,
        4,
        4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "plain_mlp": lambda: transformers.GPT2Config(vocab_size=203, n_embd=96, n_layer=3, n_head=3, n_positions=256),
}


class NotingBackend(KernelBackend):
    """Notes the attention that it chose."""

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        self.chosen = super().attention(shape)
        return self.chosen


def _errors(model: Decoder, exact: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The distance of each row's logits from the exact ones: [N_TOKENS]."""
    hidden = CachedDecoder(model, block_tokens=16).run(prompt(N_TOKENS, 203), chunks)
    return (model.logits(hidden)[:, :203] - exact).square().mean(-1).sqrt()


@dataclass(frozen=True)
class Written:
    """A checkpoint in bfloat16, and the logits of its prompt."""

    folder: Path
    exact: torch.Tensor  # by transformers in float32, [N_TOKENS, 203]
    by_torch: torch.Tensor  # the distance of torch's rows in bfloat16, [N_TOKENS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Once for all libraries."""

    @functools.cache
    def write(name: str) -> Written:
        folder = tmp_path_factory.mktemp(name)
        reference = write_checkpoint(CONFIGS[name](), folder).bfloat16()
        reference.save_pretrained(folder)
        exact = reference_logits(reference.float(), prompt(N_TOKENS, 203))
        torchs = load_model(describe(folder), SingleRank(), OneDnnBackend(torch.bfloat16))
        return Written(folder, exact, _errors(torchs, exact, []))

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_as_close_to_float32_as_torchs(
    kernels: Bfloat16Kernels, name: str, written: Callable[[str], Written]
) -> None:
    """Both round after each layer, so neither is exact; the weights are bfloat16 also for float32."""
    of, backend = written(name), NotingBackend(kernels)
    ours = load_model(describe(of.folder), SingleRank(), backend)
    assert isinstance(backend.chosen, PagedAmx if kernels.amx else PagedVectors)
    for chunks in ([], [1, 37, 1, 64, *[1] * 20]):
        by_us = _errors(ours, of.exact, chunks)
        assert by_us.median() <= 1.3 * of.by_torch.median()
        assert by_us.max() <= 2 * of.by_torch.max()
