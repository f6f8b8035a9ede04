"""What a worker makes of the fields of a Submit."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.submits import ModelLimits, to_request

LIMITS = ModelLimits(2000, (1,), "root")


def request(**sampling: object):
    return to_request(pb.Submit(request_id="a", prompt_ids=[5], sampling=pb.Sampling(**sampling)), LIMITS)


def test_as_many_stop_tokens_as_the_api_allows() -> None:
    assert len(request(stop_token_ids=range(2, 1026)).end_token_ids) == 1025
