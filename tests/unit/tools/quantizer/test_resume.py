"""A run that is killed goes on behind its last finished layer, and ends with the same bytes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from services.cli import worker_program
from services.cli.main import app
from services.compute.model.spec import ModelError
from services.tools.quantizer.run import quantize
from tests.unit.compute.model.harness import CPU
from tests.unit.tools.quantizer.models import request, write_model

# The program, which ends as by `kill -9` when it has told that the first layer is done.
_KILLED = """
import os, runpy, signal, sys
write = sys.stdout.write
def tell(text):
    write(text)
    if '"phase": "quantize", "done": 1' in text:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write = tell
runpy.run_module("services.tools.quantizer", run_name="__main__", alter_sys=True)
"""


# Experts in the first and in the third layer, a dense one between them.
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums over rows depend on the number of threads
    torch.set_num_threads(1)
    model, whole, out = (
        write_model(tmp_path / "model", "Qwen3MoeConfig", **_MIXTURE),
        tmp_path / "whole",
        tmp_path / "out",
    )
    quantize(request(model, whole, extra=0.2), CPU, lambda *_: None)
    options = ["--samples", "6", "--length", "48", "--extra", "0.2", "--device", "cpu", "--out", str(out)]
    sent = json.dumps({**asdict(request(model, out, extra=0.2)), "device": "cpu"}, default=str)
    killed = subprocess.run([sys.executable, "-c", _KILLED, sent], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    partial = tmp_path / "out.partial"
    first = partial / "model-00001-of-00004.safetensors"
    assert not out.exists()
    assert first.exists()
    written = first.stat().st_ino
    with pytest.raises(ModelError, match=r"out\.partial: holds another run \(samples 6, not 5\)"):
        quantize(request(model, out, extra=0.2, samples=5), CPU, lambda *_: None)
    ended = CliRunner().invoke(app, ["quantize", str(model), *options])
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.strip().endswith(str(out))
    assert (out / first.name).stat().st_ino == written
    assert not partial.exists()
    assert _contents(out) == _contents(whole)
    with pytest.raises(ModelError, match=f"--out {out}: exists already"):
        quantize(request(model, out, extra=0.2), CPU, lambda *_: None)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_program, "find_spec", lambda name: None if name == "torch" else object())
    refused = CliRunner().invoke(app, ["quantize", str(tmp_path), "--out", str(tmp_path / "out")])
    assert refused.exit_code == 1
    assert "needs the extra worker (torch missing)" in refused.output
    assert "[worker]'" in refused.output
