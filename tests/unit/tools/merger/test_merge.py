"""`ryzanstein merge` writes a whole checkpoint, or none and says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.stack.default_model import TINY_MODEL
from services.tools.merger.__main__ import merge_model
from services.tools.program import run
from tests.adapters import write_adapter

BEFORE = "base_model.model.model."
TABLE = f"{BEFORE}embed_tokens.lora_embedding_"
Q0 = f"{BEFORE}layers.0.self_attn.q_proj"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The command's error for a base and an adapter that it refuses; existing files stay."""

    def call(base: Path, adapter: Path, out: Path | None = None) -> str:
        out = out or adapter / "merged"
        there = out.exists()
        request = {"base": str(base), "adapter": str(adapter), "out": str(out)}
        monkeypatch.setattr(sys, "argv", ["merger", json.dumps(request)])
        assert run(merge_model) == 1
        assert out.exists() is there
        assert not list(adapter.glob(".*"))
        return str(json.loads(capsys.readouterr().out.splitlines()[-1])["error"])

    return call


def adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """An adapter of q_proj, or of `tensors` alone."""
    write_adapter(TINY_MODEL, folder, {"q_proj": 4}, **config)
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_command_merges_and_names_its_output(tmp_path: Path) -> None:
    """Of a base in several files, whose table of tokens becomes another one than its head."""
    base, out = tmp_path / "base", tmp_path / "merged"
    base.mkdir()
    for file in TINY_MODEL.glob("*.json"):
        (base / file.name).write_bytes(file.read_bytes())
    stored = load_file(TINY_MODEL / "model.safetensors")
    table = stored.pop("model.embed_tokens.weight")
    save_file({"model.embed_tokens.weight": table}, base / "a.safetensors")
    save_file(stored, base / "b.safetensors")
    files = {"model.embed_tokens.weight": "a.safetensors"} | dict.fromkeys(stored, "b.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    a, b = torch.randn(2, len(table)), torch.randn(table.shape[1], 2)
    adapter(tmp_path / "a", {f"{TABLE}A": a, f"{TABLE}B": b})
    shown = CliRunner().invoke(app, ["merge", str(base), str(tmp_path / "a"), str(out)])
    assert (shown.exit_code, shown.stdout.strip()) == (0, str(out)), shown.output
    merged = load_file(out / "a.safetensors")
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # also of the tensors
    assert torch.equal(merged["lm_head.weight"], table)
    wanted = (table.float() + 4 * (b @ a).t()).to(table.dtype)
    assert torch.allclose(merged["model.embed_tokens.weight"], wanted, rtol=1e-2)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == files | {"lm_head.weight": "a.safetensors"}
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no tensors": ({}, "adapter_model.safetensors: holds no tensors"),
    "half of a table's factors": (
        {f"{TABLE}A": torch.ones(4, 9)},
        f"{TABLE}A: its other factor, {TABLE}B, is missing",
    ),
    "factors of another layer": (
        {f"{Q0}.lora_A.weight": torch.ones(4, 9), f"{Q0}.lora_B.weight": torch.ones(7, 4)},
        "factors of model.layers.0.self_attn.q_proj.weight make [7, 9], not [",
    ),
    "a table of another size": (
        {f"{BEFORE}embed_tokens.weight": torch.ones(9, 8)},
        "embed_tokens.weight: shape [9, 8], but the base's is [",
    ),
    "a norm of another size": ({f"{BEFORE}norm.weight": torch.ones(9)}, "norm.weight: shape [9], but the base's is ["),
    "a tensor that the base lacks": (
        {f"{BEFORE}layers.9.mlp.x.weight": torch.ones(9)},
        "the base has no tensor model.layers.9.mlp.x.weight (1 in all)",
    ),
    "factors with too large a product": (
        {f"{Q0}.lora_A.weight": torch.full((4, 384), 1e20), f"{Q0}.lora_B.weight": torch.full((256, 4), 1e20)},
        "q_proj.weight: after its change not all numbers are finite in torch.",
    ),
    "a vector for a matrix": (
        {f"{Q0}.lora_A.weight": torch.ones(4), f"{Q0}.lora_B.weight": torch.ones(7, 4)},
        "q_proj.lora_A.weight: expected a matrix of ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_by_its_tensor(
    what: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    tensors, message = REFUSED[what]
    assert message in refused(TINY_MODEL, adapter(tmp_path, tensors))


def test_an_unmergeable_adapter_is_rejected(refused: Callable[..., str], tmp_path: Path) -> None:
    file, folder = tmp_path / "m.gguf", adapter(tmp_path / "a")
    file.touch()
    assert refused(TINY_MODEL, folder, file) == f"{file}: exists already"
    assert refused(TINY_MODEL, folder, file / "out") == f"{file}/.out.partial: Not a directory"
    assert "a GGUF file; `ryzanstein convert` makes a folder of it" in refused(file, folder)
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((TINY_MODEL / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    assert "quantized; merge into the checkpoint that it was made from" in refused(base, folder)
    assert "not the folder of a PEFT adapter" in refused(TINY_MODEL, base)
    for key, value, message in (
        ("r", True, "r: expected a whole number from 1 on, found True"),
        ("modules_to_save", ["norm"], "modules_to_save: norm: adapter_model.safetensors holds none of its tensors"),
        ("alpha_pattern", {"q_proj": "8"}, "alpha_pattern: 'q_proj': expected a number from 0 on, found '8'"),
    ):
        assert message in refused(TINY_MODEL, adapter(tmp_path / message[:40], **{key: value}))
