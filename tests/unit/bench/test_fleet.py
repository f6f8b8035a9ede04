"""`bench.fleet`: a small fleet under faults loses and alters no answer; the numbers of its report."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from tokenizers import Tokenizer

from bench.fleet import report
from bench.fleet.__main__ import sizes_of
from bench.fleet.counted import Messages
from bench.fleet.faults import FleetFault
from bench.fleet.installation import FleetSize
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.report import FleetRun
from bench.fleet.usage import ComponentUse
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


def use(at: float, messages: int) -> dict[str, ComponentUse]:
    return {name: ComponentUse(at, 1, at, 0, Messages(messages, 0), 10.0, 30) for name in ("router", "workers")}


def fleet_run(workers: int) -> FleetRun:
    """A run whose components exchange a message a second without workers, and one more for each."""
    size, load = FleetSize(workers, 100, 1, 1, TINY_MODEL, {}), Load((), "tiny", 1.0, 1.0)
    language = SimpleNamespace(block_tokens=16)
    workload = Workload("plain", language, (), Lengths(), random.Random(0))  # type: ignore[arg-type]
    uses = [use(at, int(at) * (workers + 1)) for at in (0.0, 1.0, 2.0)]
    none = {float("inf"): 0.0}
    return FleetRun(size, load, workload, [], *uses, none, none, [0] * workers, [], [], 0, None)


def test_larger_fleets_are_on_the_line_through_three_sizes() -> None:
    model = asyncio.run(open_model(WorkerSettings(model=str(TINY_MODEL), engine="simulated"), TINY_MODEL))
    tokenizer = Tokenizer.from_buffer(model.model.tokenizer_json)
    both = report.table([fleet_run(10), fleet_run(100)], tokenizer)
    assert "by a line" not in both, "two sizes always lie on a line"
    table = report.table([fleet_run(workers) for workers in (10, 100, 300)], tokenizer)
    assert cell(table, "routers, gateways, coordinators") == "1, 1, 1 | 1, 1, 1 | 1, 1, 1"
    for workers, loaded, idle in (("10", "11.0", "11.0"), ("300", "301.0", "301.0"), ("1,000 by a line", "", "1001.0")):
        row = re.search(rf"^\| router \| {workers} \| .*$", table, re.MULTILINE)
        assert row, table
        cells = row[0].split(" | ")
        assert [cells[columns(table)[name]] for name in ("messages/s", "messages/s, idle")] == [loaded, idle]


def test_sweep_takes_numbers_of_workers() -> None:
    assert sizes_of("10, 300,10") == [10, 300]
    for sweep in ("10,x", "0", "-1", "10;20", "10,", ","):
        with pytest.raises(typer.BadParameter, match="10,100,300"):
            sizes_of(sweep)


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
