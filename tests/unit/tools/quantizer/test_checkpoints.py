"""Quantized checkpoints are what others read: transformers with compressed-tensors, and our worker."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CompressedTensorsConfig

from services.compute.model.spec import ModelError
from services.tools.program import run
from services.tools.quantizer.__main__ import quantize_model
from services.tools.quantizer.calibration import read_texts
from services.tools.quantizer.folder import PartialFolder
from services.tools.quantizer.methods.base import Inputs, Repeats
from services.tools.quantizer.methods.registry import METHODS
from services.tools.quantizer.methods.rtn import RoundToNearest
from services.tools.quantizer.run import quantize
from services.tools.quantizer.scheme import Scheme
from tests.unit.compute.model.harness import CPU
from tests.unit.compute.model.test_encoders import CONFIGS
from tests.unit.tools.quantizer.models import our_logits, request, their_logits, write_model

_GPT2: dict[str, Any] = {"vocab_size": 260, "n_embd": 64, "n_layer": 1, "n_head": 4}
_QWEN2_MOE: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 1,
}
_GLM4_MOE: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
_BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


class ScaledRounding(RoundToNearest):
    """Rounds after random factors, so that a fold that changes an output cannot go unnoticed."""

    calibrated = scales = True

    def scale(self, weight: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype, repeats: Repeats) -> Tensor:
        n_factors, seed = len(repeats.mean(inputs.magnitudes)), torch.Generator().manual_seed(0)
        return repeats.spread(2.0 ** torch.randint(-1, 2, (n_factors,), generator=seed))


def _ignore(_phase: str, _done: int, _of: int) -> None:
    pass


@pytest.mark.parametrize(
    ("config", "settings", "sent", "stored_as", "off"),
    [
        # 4 bits err by tens of percent on random weights, 8 bits by 3: they show that factors change nothing else.
        ("LlamaConfig", _BIASED, {"method": "scaling", "bits": 8, "group": 32}, "int-quantized", 0.1),
        ("Gemma3TextConfig", {}, {"method": "scaling", "bits": 8, "group": 32}, "int-quantized", 0.1),
        ("LlamaConfig", {}, {"method": "gptq", "bits": 4, "extra": 0.4}, "mixed-precision", 0.5),
        ("Phi3Config", {}, {"method": "rtn", "bits": 4, "group": 32}, "mixed-precision", 0.8),
        ("Qwen3Config", {"tie_word_embeddings": True}, {"method": "awq", "bits": 4}, "pack-quantized", 0.8),
        ("LlamaConfig", {"tie_word_embeddings": True}, {"bits": 4, "symmetric": False}, "pack-quantized", 0.8),
        # Every row goes to all experts: rounding that chooses another one would hide a factor that changes outputs.
        ("Qwen2MoeConfig", _QWEN2_MOE, {"method": "scaling", "bits": 8, "group": 32}, "pack-quantized", 0.1),
        ("Glm4MoeConfig", _GLM4_MOE, {"method": "gptq", "bits": 4, "extra": 0.2}, "mixed-precision", 0.5),
    ],
)
def test_transformers_and_our_worker_read_the_checkpoint(
    config: str,
    settings: dict[str, Any],
    sent: dict[str, Any],
    stored_as: str,
    off: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "scaling", ScaledRounding())
    model = write_model(tmp_path / "model", config, **settings)
    out = tmp_path / "quantized"
    quantize(request(model, out, **sent), CPU, _ignore)
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["format"] == stored_as
    # Of packed zeros, compressed-tensors 0.20 makes room for unpacked ones, unless it dequantizes while it loads.
    how = {} if sent.get("symmetric", True) else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    ours, theirs, exact = our_logits(out), their_logits(out, **how), our_logits(model)
    assert (ours - theirs).abs().max() <= 2e-3 * exact.std()
    lost = (ours - exact).norm() / exact.norm()
    assert lost <= off, lost
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert not out.with_name("quantized.partial").exists()
    assert {file.stat().st_mode for file in out.iterdir()} == {(out / "config.json").stat().st_mode}


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", r"GGUF is not quantized; allowed: .* `ryzanstein convert .*\.gguf DIR`"),
        ("cuda", "--device cuda: this machine has no usable CUDA device; allowed: auto, cpu"),
    ],
)
def test_the_command_reports_its_rejections(
    device: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sent = {**asdict(request(tmp_path / "model.gguf", tmp_path / "out")), "device": device}
    monkeypatch.setattr(sys, "argv", ["quantizer", json.dumps(sent, default=str)])
    assert run(quantize_model) == 1
    assert re.search(reason, json.loads(capsys.readouterr().out)["error"])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "model", "LlamaConfig"), tmp_path / "out"
    with pytest.raises(ModelError, match=r"--out .*config.json/out: Not a directory"):
        quantize(request(model, model / "config.json" / "out"), CPU, _ignore)
    with PartialFolder(out, 1).locked(), pytest.raises(ModelError, match=r"out.partial: another process writes it"):
        quantize(request(model, out), CPU, _ignore)


def test_without_a_text_of_its_own_a_python_needs_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(read_texts(None)) > 10
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ModelError, match="--calibration: this Python has no pydoc_data"):
        read_texts(None)


@pytest.mark.parametrize(
    ("config", "settings", "sent", "message"),
    [
        ("LlamaConfig", {}, {"group": 128}, r"--group 128: does not divide all of \[64, 128\] inputs; allowed: 64, 32"),
        ("LlamaConfig", {"hidden_size": 48}, {}, "none of the groups 128, 64, 32 divides all of"),
        ("LlamaConfig", {}, {"length": 129}, "--length 129: the model was made for 128 positions"),
        ("LlamaConfig", {}, {"calibration": "short.txt"}, "--calibration: 5 tokens; at least --length 48 are needed"),
        ("LlamaConfig", {}, {"calibration": "no.jsonl"}, 'line 2: expected an object with the string "text"'),
        ("LlamaConfig", {}, {"calibration": "none.txt"}, "none.txt: .*No such file"),
        ("LlamaConfig", {}, {"calibration": "broken.jsonl"}, r"broken.jsonl: line 1: not JSON"),
        ("LlamaConfig", {}, {"calibration": "few.jsonl"}, "--calibration: 6 tokens; at least --length 48 are needed"),
        ("ApertusConfig", {}, {}, "the family apertus is not quantized; "),
        (
            "GraniteMoeConfig",
            {"num_local_experts": 2},
            {},
            "input_linear.weight: stored transposed or stacked, .* --quantization int8",
        ),
        (
            "GPT2Config",
            {"vocab_size": 260, "n_embd": 64, "n_layer": 1, "n_head": 4},
            {},
            "c_attn.weight: stored transposed or stacked, .* --quantization int8",
        ),
    ],
)
def test_an_unquantizable_model_is_rejected_by_name(
    config: str, settings: dict[str, Any], sent: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "no.jsonl").write_text('{"text": "yes"}\n{"texts": "no"}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    model = write_model(tmp_path / "model", config, **settings)
    if "calibration" in sent:
        sent = {**sent, "calibration": tmp_path / sent["calibration"]}
    with pytest.raises(ModelError, match=message):
        quantize(request(model, tmp_path / "out", **sent), CPU, _ignore)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_encoder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    transformers.AutoModel.from_config(CONFIGS[name]()).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"an encoder, the family [\w-]+, is not quantized; .*--quantization int8"):
        quantize(request(folder, tmp_path / "out"), CPU, _ignore)
    assert not (tmp_path / "out.partial").exists()
