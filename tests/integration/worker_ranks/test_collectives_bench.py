"""`bench.collectives` runs under torchrun and prints numbers that fit together."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.collectives import measure, show
from bench.decode_share import predict_speedup
from services.cli.stack.default_model import TINY_MODEL


def test_two_ranks_measure_collectives_and_decode_steps() -> None:
    report = measure(2, ["--repeats", "5", "--model", str(TINY_MODEL)])
    assert report["ranks"] == 2
    assert [timing["n_bytes"] for timing in report["timings"]] == [4 << 10 << 2 * i for i in range(6)]
    for timing in report["timings"]:
        assert 0 < timing["shared_memory_p50"] <= timing["shared_memory_p99"]
        assert 0 < timing["gloo_p50"] <= timing["gloo_p99"]
    step = report["step"]
    whole = step["forward_us"] + step["communication_us"] + step["sample_us"]
    assert report["share"] == pytest.approx(step["communication_us"] / whole)
    assert report["share"] > 0, "two ranks must communicate"
    assert report["speedup"] == {str(n): pytest.approx(predict_speedup(report["share"], 2, n)) for n in (2, 4, 8)}
    share = {"share": 0.2, "speedup": {"2": predict_speedup(0.2, 2, 2)}}
    shown = show(report | share)
    assert "communication is 20.0% of a decode step at 2 ranks" in shown
    assert "predicted over one rank, 2 ranks: 1.60x" in shown


def test_a_missing_model_is_said() -> None:
    command = [sys.executable, "-m", "bench.collectives", "--model", "/no/such/folder"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "/no/such/folder: no config.json there" in ran.stderr


@given(st.floats(0, 0.99), st.integers(2, 16), st.integers(2, 64))
def test_no_prediction_beats_the_number_of_ranks(share: float, measured: int, ranks: int) -> None:
    assert predict_speedup(share, measured, ranks) <= ranks * (1 + 1e-9)
    assert predict_speedup(0.0, measured, ranks) == pytest.approx(ranks)
    assert predict_speedup(share, measured, 1) == pytest.approx(1)
