"""`bench.fleet`: a small fleet under faults loses and alters no answer; the numbers of its report."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.fleet.load import FleetAnswer
from bench.fleet.workloads import Lengths, Workload
from services.cli.stack.default_model import TINY_MODEL
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_model

PROJECT = Path(__file__).resolve().parents[3]


def cell(table: str, name: str) -> str:
    found = re.search(rf"^\| {name} \| (.*) \|$", table, re.MULTILINE)
    assert found, table
    return found[1]


@pytest.mark.timeout(700)
def test_fleet_loses_and_alters_no_answer_under_every_fault(tmp_path: Path) -> None:
    """The long form is `make test-fleet`."""
    sizes = ("--workers", "6", "--per-process", "3", "--routers", "2", "--rate", "8", "--seconds", "6.2")
    faults = ("--faults", "3", "--fault-every", "1", "--speed", "0.5", "--answer-tokens", "60", "--workload", "agents")
    command = [sys.executable, "-m", "bench.fleet", *sizes, *faults, "--json", str(tmp_path / "readings.json")]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = ran.stdout
    assert cell(table, "lost, altered, leaked") == "0, 0, 0"
    assert cell(table, "faults").count("1 x") == 6, "every kind once"
    assert int(cell(table, "attempts that went on elsewhere")) > 0, "faults that hit no request show nothing"
    for component in ("redis", "kv-coordinator", "router", "gateway", "workers"):
        assert re.search(rf"^\| {component} \| \d+ \|", table, re.MULTILINE), table


def test_answer_is_altered_by_a_letter_and_lost_without_an_end() -> None:
    model = asyncio.run(open_model(WorkerSettings(model=str(TINY_MODEL), engine="simulated"), TINY_MODEL))
    tokenizer = Tokenizer.from_buffer(model.model.tokenizer_json)
    language = model.simulation.language
    request = Workload("plain", language, language.words, Lengths(64, 48, 8), random.Random(1)).next()
    right = tokenizer.decode(list(request.answer_ids))
    whole = FleetAnswer(request, 0.0, text=right, finish="length")
    assert not whole.lost()
    assert not whole.altered(tokenizer)
    assert FleetAnswer(request, 0.0, text=right[:-1], finish="length").altered(tokenizer)
    assert FleetAnswer(request, 0.0, text=right).lost()
    assert FleetAnswer(request, 0.0, text=right, finish="length", error="500").lost()
