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

from bench.fleet.faults import FleetFault
from bench.fleet.load import FleetAnswer
from bench.fleet.workloads import Lengths, Workload
from services.cli.stack.default_model import TINY_MODEL
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_model

PROJECT = Path(__file__).resolve().parents[3]


def cell(table: str, name: str) -> str:
    actual = re.search(rf"^\| {name} \| (.*) \|$", table, re.MULTILINE)
    assert actual, table
    return actual[1]


@pytest.mark.timeout(700)
def test_fleet_loses_and_alters_no_answer_under_every_fault(tmp_path: Path) -> None:
    """The long form is `make test-fleet`. Answers take longer than the pause between faults, which wait for them."""
    sizes = ("--workers", "6", "--per-process", "3", "--routers", "2", "--coordinators", "2")
    load = ("--rate", "4", "--seconds", "1.9")
    answers = ("--speed", "0.15", "--answer-tokens", "20", "--workload", "agents")
    faults = ("--faults", "3", "--fault-every", "0.2", "--json", str(tmp_path / "readings.json"))
    command = [sys.executable, "-m", "bench.fleet", *sizes, *load, *answers, *faults]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = ran.stdout
    assert cell(table, "lost, altered, leaked") == "0, 0, 0"
    assert cell(table, "faults").count("1 x") == len(FleetFault), "every kind once"
    assert int(cell(table, "attempts that went on elsewhere")) > 0, "faults that hit no request show nothing"
    assert cell(table, "faults during an answer, at most") == "1", "a request that loses three workers counts as poison"
    for component in ("redis", "kv-coordinator", "router", "gateway", "workers"):
        assert re.search(rf"^\| {component} \| \d+ \|", table, re.MULTILINE), table


@pytest.mark.timeout(700)
def test_fleet_without_faults_fills_the_page_of_the_fleet(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    page.write_text("<!-- fleet with prefix requests -->\n<!-- end of fleet with prefix requests -->\n")
    sizes = ("--sweep", "2", "--rate", "10", "--seconds", "1", "--idle-seconds", "0", "--workload", "prefix")
    command = [sys.executable, "-m", "bench.fleet", *sizes, "--out", str(page), "--json", str(tmp_path / "readings")]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = page.read_text()
    assert cell(table, "lost, altered, leaked") == "0, 0, 0"
    assert " s, " in cell(table, "a tenth more workers join, are lost")
    column = columns(table)["messages/s"]
    for component in ("redis", "kv-coordinator", "router", "gateway", "workers"):
        (row,) = re.findall(rf"^\| {component} \| 2 \| .*$", table, re.MULTILINE)
        assert float(row.split(" | ")[column]) > 0, row
    readings = (tmp_path / "readings").read_text()
    assert "fleet/2 workers, 10/s, prefix/gateway messages/s" in readings


def columns(table: str) -> dict[str, int]:
    """The places of the names in the head of the table of components."""
    (head,) = re.findall(r"^\| component \| .*$", table, re.MULTILINE)
    return {name: place for place, name in enumerate(head.split(" | "))}


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
