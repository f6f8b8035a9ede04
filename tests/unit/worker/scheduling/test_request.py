"""A request's output follows from what the ranks return for its chunk."""

from __future__ import annotations

import math

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.token_logprobs import NO_TOKEN, TokenLogprobs
from services.worker.engine.output import MODEL, Finish
from services.worker.protocol.plan import Chunk, SlotResult
from services.worker.scheduling.request import Request

CHUNK = Chunk(0, 0, 3, draws=True)
ONE, NAN = TokenLogprobs(5, -1.0, 1), TokenLogprobs(1, math.nan, 1)


@pytest.mark.parametrize(
    ("options", "record", "finish", "token_ids"),
    [
        ({}, SlotResult(0, (5,)), None, (5,)),
        ({}, SlotResult(0, (NO_TOKEN,)), Finish.FAILED, ()),
        ({}, SlotResult(0, (5, 6, NO_TOKEN)), Finish.FAILED, (5, 6)),
        ({}, SlotResult(0, (5, 2, NO_TOKEN)), Finish.STOP, (5, 2)),
        ({"embed": True}, SlotResult(0, pooled=(0.5, -0.5)), Finish.EMBEDDED, ()),
        ({"embed": True}, SlotResult(0, pooled=(0.5, math.nan)), Finish.FAILED, ()),
        ({"embed": True}, SlotResult(0, pooled=(math.inf, -math.inf)), Finish.FAILED, ()),
        ({"scored": True}, SlotResult(0, (2,), prompt_logprobs=(NAN,)), Finish.FAILED, ()),
        ({}, SlotResult(0, (5,), logprobs=(NAN,)), Finish.FAILED, ()),
        ({}, SlotResult(0, (5, NO_TOKEN), logprobs=(ONE, NAN)), Finish.FAILED, (5,)),
    ],
)
def test_numbers_that_are_not_finite_end_a_request(
    options: dict[str, bool], record: SlotResult, finish: Finish | None, token_ids: tuple[int, ...]
) -> None:
    sampling = Sampling(stop_token_ids=[2])
    if options.pop("scored", False):
        sampling.prompt_logprobs = 0
    request = Request([7, 8, 9], 3, sampling, limit=100, **options)
    output = request.advance(CHUNK, record)
    assert output is not None
    assert (output.finish, output.token_ids) == (finish, token_ids)
    assert output.embedding == (record.pooled if finish is Finish.EMBEDDED else ())
    assert bool(output.failure) == (finish is Finish.FAILED)
    assert output.failed_field == MODEL or not output.failure
