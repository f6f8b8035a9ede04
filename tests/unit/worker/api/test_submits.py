"""What a worker makes of the fields of a Submit."""

from __future__ import annotations

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.submits import ModelLimits, to_request

LIMITS = ModelLimits(2000, (1,), "root")


def request(**sampling: object):
    return to_request(pb.Submit(request_id="a", prompt_ids=[5], sampling=pb.Sampling(**sampling)), LIMITS)


@pytest.mark.parametrize(("asked", "computed"), [(1e-46, 0), (1e-42, 0), (1e-38, 0), (9e-6, 0), (2e-5, 2e-5), (1, 1)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(asked: float, computed: float) -> None:
    assert request(temperature=asked).sampling.temperature == pytest.approx(computed)


def test_as_many_stop_tokens_as_the_api_allows() -> None:
    assert len(request(stop_token_ids=range(2, 1026)).sampling.end_token_ids) == 1025
