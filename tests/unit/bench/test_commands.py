"""Every `python -m bench.<name>` runs with small sizes, or it is listed why not."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.worker.simulated.curve import DEFAULT_CURVE

PROJECT = Path(__file__).resolve().parents[3]
TINY = str(TINY_MODEL)

# The smallest form of each, and a part of the name of a reading that it writes; empty: it writes none.
SMALL = {
    "engine": ([TINY, "--batches", "1,2", "--rounds", "1", "--prompt-tokens", "8", "--output-tokens", "16"], "decode"),
    "attention": ([TINY, "--lengths", "300", "--steps", "1", "--modes", "dense; top_k(4)"], "top_k(4)"),
    "coordinator": (["--workers", "4", "--blocks", "200", "--events", "20"], "lookup"),
    "collectives": (["--repeats", "2"], "all"),
    "fidelity": (
        [
            *(TINY, "--curve", str(DEFAULT_CURVE), "--no-simulated", "--shares", "0.5", "--seconds", "1"),
            *("--rounds", "1", "--worker-cores", "1" if len(os.sched_getaffinity(0)) > 1 else "0"),
        ],
        "planned/pace p50",
    ),
    "generate": ([TINY, "--batches", "1", "--rounds", "1", "--prompt-tokens", "8", "--output-tokens", "16"], ""),
    "long_context": (
        [
            *(TINY, "--text", str(PROJECT / "bench" / "gateway.py"), "--lengths", "700", "--forced", "20"),
            *("--modes", "dense; window(16, 128); top_k(5)"),
        ],
        "700/window(16, 128)/perplexity",
    ),
    "make_checkpoint": (["15m", "OUT"], ""),
    "neighbours": ([TINY, "--neighbour", TINY, "--rounds", "1", "--tokens", "16"], "a neighbour wakes"),
    "policies": (["--workers", "2", "--rates", "1", "--seconds", "3"], "round_robin/first token p50"),
    "sleep": ([TINY, "--rounds", "1"], "first token"),
    "standstill": (["--seconds", "0.1"], ""),
    "tiers": (
        [
            *(TINY, "--sessions", "2", "--turns", "2", "--first-tokens", "64", "--turn-tokens", "64", "--gib", "0.1"),
            *("--modes", "both", "--rounds", "1", "--prefix-tokens", "64"),
        ],
        "first token after a restart",
    ),
    "start": (
        ["--rounds", "1", "--model", TINY_MODEL.name, "--arguments", f"--model {TINY} --tensor-parallel 1"],
        "first token",
    ),
}
HERE = ("generate", "make_checkpoint")  # run in this process, which may have imported torch and transformers
ELSEWHERE = {
    **dict.fromkeys(("gateway", "router", "speculation"), "tests/e2e/test_documents.py"),
    "scheduler": "tests/unit/bench/test_suite.py",
    "evaluate": "tests/e2e/test_evaluate.py",
    "gguf_fuzz": "tests/unit/compute/model/formats/gguf/test_container.py",
    "gguf_parity": "tests/unit/compute/model/formats/gguf/test_real_model.py",
    "gpu_kernels": "Makefile",
    "collectives_rank": "bench/collectives.py",
    "gateway_mocks": "bench/gateway.py",
    "worker_peers": "bench/served_engine.py",
}
NOT_RUN = {
    "compare": "needs another server",
    "compare_report": "its functions are tested",
    "failover": "needs a load that outlives its workers",
    "fallback": "needs a load that outlives its workers",
    "gpu_trace": "needs a GPU",
    "hybrid": "needs another server",
    "llama_server": "needs llama.cpp",
    "resume": "needs a load that outlives its workers",
    "serve": "needs an installation; `start` sends a request of it",
    "soak": "takes minutes; tests/cluster/test_soak.py runs it",
}


@pytest.mark.parametrize("name", SMALL)
def test_bench_runs_with_small_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, reading = SMALL[name]
    file = tmp_path / "readings.json"
    written = ["--json", str(file)] if reading else []
    command = [str(tmp_path) if part == "OUT" else part for part in [*arguments, *written]]
    if name in HERE:
        monkeypatch.setattr(sys, "argv", [f"bench.{name}", *command])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROJECT / "bench" / f"{name}.py"), run_name="__main__")
        assert not ended.value.code
        return
    line = [sys.executable, "-m", f"bench.{name}", *command]
    ran = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    if reading:
        assert [one for one in json.loads(file.read_text()) if reading in str(one)], file.read_text()


def test_every_bench_is_run_or_has_a_reason() -> None:
    commands = {file.stem for file in (PROJECT / "bench").glob("*.py") if "__main__" in file.read_text()}
    assert commands == SMALL.keys() | ELSEWHERE.keys() | NOT_RUN.keys()
    for name, place in ELSEWHERE.items():
        assert name in (PROJECT / place).read_text(), f"{place} does not run bench.{name}"
