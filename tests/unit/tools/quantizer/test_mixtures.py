"""Experts are calibrated on the tokens that are routed to them; stacked ones become the same checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from services.tools.quantizer.calibration import read_texts, sequences
from services.tools.quantizer.run import QuantizationOptions, quantize
from tests.unit.compute.model.harness import CPU
from tests.unit.tools.quantizer.models import request, write_model

_N_EXPERTS, _FFN = 8, 128
_MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_local_experts": _N_EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> QuantizationOptions:
    folder = tmp_path_factory.mktemp("mixture")
    return request(write_model(folder / "model", "MixtralConfig", **_MIXTURE), folder / "out")


@pytest.fixture(scope="module")
def note(options: QuantizationOptions) -> str:
    """Of the run that writes `asked.out`."""
    return quantize(options, CPU, lambda *_: None)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _tokens_of_experts(options: QuantizationOptions) -> list[int]:
    """How many of the calibration's tokens transformers routes to each expert."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = sequences(read_texts(None), tokenizer, None, options.samples, options.length)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits[0]
    return torch.bincount(logits.topk(2).indices.flatten(), minlength=_N_EXPERTS).tolist()


def test_experts_that_see_too_few_tokens_are_rounded(options: QuantizationOptions, note: str) -> None:
    quantize(replace(options, method="rtn", out=options.out.with_name("rounded")), CPU, lambda *_: None)
    seen = _tokens_of_experts(options)
    few = {f"experts.{expert}.up" for expert, n in enumerate(seen) if n < 64}
    few |= {f"experts.{expert}.down" for expert, n in enumerate(seen) if n < _FFN}
    assert 0 < len(few) < 2 * _N_EXPERTS, seen
    layer = json.loads((options.out / "quantize.json").read_text())["layers"][0]
    assert {name for name, (_, _, method) in layer.items() if method == "rtn"} == few
    assert note.startswith(f"{len(few)} of {2 * _N_EXPERTS} sets of experts' matrices saw too few tokens for gptq")
    ours, rounded = _weights(options.out), _weights(options.out.with_name("rounded"))
    for expert in range(_N_EXPERTS):
        for matrix, unit in (("w1", "up"), ("w3", "up"), ("w2", "down")):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight_packed"
            assert torch.equal(ours[name], rounded[name]) == (f"experts.{expert}.{unit}" in few), name
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert torch.equal(ours[router], _weights(options.model)[router])


def test_stacked_experts_become_the_same_checkpoint(options: QuantizationOptions, note: str, tmp_path: Path) -> None:
    model, module = tmp_path / "model", "model.layers.0.block_sparse_moe."
    shutil.copytree(options.model, model)
    tensors = _weights(model)
    parts = [
        torch.stack([tensors.pop(f"{module}experts.{n}.{part}.weight") for n in range(_N_EXPERTS)])
        for part in ("w1", "w3", "w2")
    ]
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop(f"{module}gate.weight")
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat(parts[:2], dim=1)
    tensors["model.layers.0.mlp.experts.down_proj"] = parts[2]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert quantize(replace(options, model=model, out=tmp_path / "out"), CPU, lambda *_: None) == note
    for file in (*options.out.glob("*.safetensors"), options.out / "config.json"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
