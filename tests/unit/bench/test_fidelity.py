"""`bench.fidelity`: the trace that it sends, simulates and plans is the same for all sides."""

from __future__ import annotations

import itertools

import pytest

from bench.fidelity import PLANNED, SIMULATED, Fleet, Measured, table
from bench.mixture import ServedRequest, draw_trace
from bench.worker_cores import WorkerCores
from services.planner.workers import request_of


def test_trace_repeats_by_its_seed_and_replays_the_shared_prefixes_of_its_prompts() -> None:
    trace = draw_trace(4.0, 20.0, seed=1)
    assert trace == draw_trace(4.0, 20.0, seed=1)
    assert trace != draw_trace(4.0, 20.0, seed=2)
    assert all(before.at < after.at < 20.0 for before, after in itertools.pairwise(trace))
    replayed = [request_of(each.to_replay(), number) for number, each in enumerate(trace)]
    shared = 0
    for index, one in enumerate(trace):
        for other in range(index):
            cuts = range(64, min(len(one.prompt), 256), 64)
            common = [trace[other].prompt[:n] == one.prompt[:n] for n in cuts]
            assert common == [replayed[other].token_ids[:n] == replayed[index].token_ids[:n] for n in cuts]
            shared += any(common)
    assert shared


def test_first_side_is_the_reference() -> None:
    served = {SIMULATED: ServedRequest(0.0, 0.5, 0.05, 10), PLANNED: ServedRequest(0.0, 0.4, 0.04, 10)}
    measured_runs = {side: [[request]] for side, request in served.items()}
    measured = Measured(0.5, 1.0, measured_runs)
    assert measured.others == [PLANNED]
    assert measured.error(PLANNED, "first token p50") == pytest.approx(-0.2)
    assert "| first token p50 | 0.500 s | 0.400 s | -20.0% |" in table(
        [measured], Fleet(4, WorkerCores.divide(0)), "model"
    )
