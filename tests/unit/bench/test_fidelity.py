"""`bench.fidelity`: the same trace for all sides, and errors by what was measured."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from bench.fidelity import PLANNED, REAL, Measured, capacity, forecast, readings
from bench.mixture import draw_trace, send
from services.planner.workers import request_of
from services.worker.simulated.curve import DEFAULT_CURVE, StepCurve


def test_trace_repeats_by_its_seed_and_replays_the_shared_prefixes_of_its_prompts() -> None:
    trace = draw_trace(4.0, 20.0, seed=1)
    assert trace == draw_trace(4.0, 20.0, seed=1)
    assert trace != draw_trace(4.0, 20.0, seed=2)
    assert all(before.at < after.at < 20.0 for before, after in itertools.pairwise(trace))
    replayed = [request_of(each.to_replay(), number) for number, each in enumerate(trace)]
    shared = 0
    for index, one in enumerate(trace):
        for other in range(index):
            common = [trace[other].prompt[:n] == one.prompt[:n] for n in range(64, min(len(one.prompt), 256), 64)]
            as_replayed = [
                replayed[other].token_ids[:n] == replayed[index].token_ids[:n]
                for n in range(64, min(len(one.prompt), 256), 64)
            ]
            assert as_replayed == common
            shared += any(common)
    assert shared


def test_forecast_is_slower_near_the_capacity_and_errors_are_parts_of_the_real_value() -> None:
    curve = StepCurve.read(DEFAULT_CURVE)
    most = 2 * capacity(curve)
    few, many = (forecast(curve, 2, draw_trace(share * most, 10.0, seed=3)) for share in (0.3, 2.0))
    assert max(each.first_token_s for each in many) > 2 * max(each.first_token_s for each in few)
    slower = [replace(each, first_token_s=each.first_token_s * 1.25) for each in few]
    measured = Measured(0.3, most * 0.3, {REAL: [few, few], PLANNED: [slower, few]})
    assert measured.error(PLANNED, "first token p95", slice(0, 1)) == pytest.approx(0.25)
    assert measured.error(PLANNED, "first token p95", slice(1, 2)) == 0
    written = {reading.name.rpartition("/")[2]: reading.value for reading in readings([measured], 2)}
    assert written["pace p50, error"] == 0
    assert 0 < written["first token p95, error"] <= 25


async def test_answer_that_ends_early_ends_the_bench() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"token_ids": [5], "text": "a"}]}\n\n')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (request,) = draw_trace(1.0, 0.0, seed=0)
        with pytest.raises(RuntimeError, match=f"1 of {request.answer_tokens} tokens: the stream ended"):
            await send(f"http://127.0.0.1:{port}", "any", [request])
