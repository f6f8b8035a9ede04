"""`bench.fleet`: a small fleet under faults loses and alters no answer; the numbers of its report."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from bench.fleet.counted import Messages
from bench.fleet.faults import FleetFault
from bench.fleet.installation import FleetSize
from bench.fleet.knee import find_knee
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.report import FleetRun
from bench.fleet.usage import ComponentUse
from bench.fleet.workloads import Lengths, Workload
from services.cli.stack.default_model import TINY_MODEL
from services.gateway.generation.poison import MOST_DEATHS
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_model

PROJECT = Path(__file__).resolve().parents[3]


def cell(table: str, name: str) -> str:
    matched = re.search(rf"^\| {name} \| (.*) \|$", table, re.MULTILINE)
    assert matched, table
    return matched[1]


@pytest.mark.timeout(700)
def test_fleet_loses_and_alters_no_answer_under_every_fault(tmp_path: Path) -> None:
    """The long form is `make test-fleet`. An answer takes 3 s, longer than the pause between faults."""
    sizes = ("--workers", "6", "--per-process", "3", "--routers", "2", "--gateways", "2", "--coordinators", "2")
    load = ("--rate", "8", "--streams", "24", "--seconds", "1.9")
    answers = ("--prompt-tokens", "64", "--answer-tokens", "20", "--workload", "agents")
    faults = ("--faults", "3", "--fault-every", "0.2", "--json", str(tmp_path / "readings.json"))
    command = [sys.executable, "-m", "bench.fleet", *sizes, *load, *answers, *faults]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = ran.stdout
    assert cell(table, "lost, altered, leaked") == "0, 0, 0"
    assert cell(table, "faults").count("1 x") == len(FleetFault), "every kind once"
    assert int(cell(table, "attempts that went on elsewhere")) > 0, "faults that hit no request show nothing"
    assert 1 < int(cell(table, "attempts of an answer, at most")) < MOST_DEATHS
    assert cell(table, "open streams, at most") == "24", "as many as were asked for, however slow the machine"
    for component in ("redis", "kv-coordinator", "router", "gateway", "workers"):
        assert re.search(rf"^\| {component} \| \d+ \|", table, re.MULTILINE), table


@pytest.mark.timeout(700)
def test_fleet_without_faults_fills_the_page_of_the_fleet(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    page.write_text("<!-- fleet with prefix requests -->\n<!-- end of fleet with prefix requests -->\n")
    sizes = ("--sweep", "2,12", "--rate", "10", "--seconds", "1", "--idle-seconds", "3", "--workload", "prefix")
    command = [sys.executable, "-m", "bench.fleet", *sizes, "--out", str(page), "--json", str(tmp_path / "readings")]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table = page.read_text()
    assert cell(table, "lost, altered, leaked") == "0, 0, 0 | 0, 0, 0"
    assert cell(table, "a tenth more workers join, are lost").count(" s, ") == 2
    assert cell(table, "a router, a coordinator, Redis are replaced").count(" s") == 6
    assert re.fullmatch(r"[1-9]\d*/s, \d.\d\d s \| [1-9]\d*/s, \d.\d\d s", cell(table, "KV events, longest lag")), table
    for component in ("redis", "kv-coordinator", "router", "gateway", "workers"):
        assert min(costs(table, component, "messages/s")) > 0, component
    few, many = costs(table, "router", "messages/s, idle")
    assert many - few > 5, "each of ten more workers sends a heartbeat a second"
    few, many = costs(table, "gateway", "messages/s, idle")
    assert many - few < 2, "a gateway takes none of workers that it does not use"
    readings = (tmp_path / "readings").read_text()
    assert "fleet/2 workers, 10/s, prefix/gateway messages/s" in readings


def costs(table: str, component: str, cost: str) -> list[float]:
    """A cost of a component in each of the fleets."""
    rows = re.findall(rf"^\| {component} \| \d+ \| .*$", table, re.MULTILINE)
    return [float(row.split(" | ")[columns(table)[cost]]) for row in rows]


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
    return FleetRun(size, load, workload, [], *uses, none, none, [0] * workers, [], [], 0, None, None)


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


@pytest.mark.timeout(700)
def test_published_trace_is_served_and_reported_for_other_tools(tmp_path: Path) -> None:
    """Ten requests that share a prefix of two blocks, longer than the model; the trace takes 9 s, and runs in 1.8 s."""
    trace, reports = tmp_path / "trace.jsonl", tmp_path / "reports"
    shared = {"input_length": 2400, "output_length": 6}
    lines = [json.dumps({"timestamp": 1000 * n, **shared, "hash_ids": [7, 8, n + 10]}) for n in range(10)]
    trace.write_text("\n".join(lines))
    sizes = ("--workers", "2", "--trace", str(trace), "--load", "5", "--speed", "20", "--idle-seconds", "0")
    command = [sys.executable, "-m", "bench.fleet", *sizes, "--lifecycles", str(reports)]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert cell(ran.stdout, "lost, altered, leaked") == "0, 0, 0"
    assert "10 in 10 s" in cell(ran.stdout, "requests")
    report = json.loads((reports / "stage_0_lifecycle_metrics.json").read_text())
    successes, load = report["successes"], report["load_summary"]
    assert (successes["count"], report["failures"]["count"], load["count"]) == (10, 0, 10)
    assert load["requested_rate"] == pytest.approx(10 / 1.8)
    assert successes["prompt_tokens"]["total"] == 24_000
    assert successes["prompt_tokens"]["cached"] >= 1024, "two blocks of the trace are a prefix of 1,024 tokens"
    assert successes["output_tokens"]["median"] == 6
    latency = successes["latency"]
    assert 0 < latency["time_to_first_token"]["p99"] <= latency["request_latency"]["p99"]
    assert latency["inter_token_latency"] is None


def test_knee_is_the_highest_rate_that_holds() -> None:
    def measure(rate: float) -> FleetRun:
        run = fleet_run(1)
        return replace(run, load=replace(run.load, rate=rate))

    knee = find_knee(measure, lambda run, first: run.load.rate < 65 * first.load.rate / 10, 10.0)
    assert [(run.load.rate, held) for run, held in zip(knee.tried, knee.held, strict=True)] == [
        (10.0, True),
        (20.0, True),
        (40.0, True),
        (80.0, False),
        (60.0, True),
    ]
    assert knee.half is not None
    assert (knee.rate, knee.half.load.rate) == (60.0, 30.0)
    assert "Knee: 60 requests/s." in knee.table()
    none = find_knee(measure, lambda run, first: False, 10.0)
    assert (len(none.tried), none.rate, none.half) == (1, 0.0, None)
