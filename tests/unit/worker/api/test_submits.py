"""What a worker makes of the fields of a Submit."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.submits import to_request
from services.worker.engine.state import EngineFacts
from tests.unit.worker.engine.fake_engine import MODEL

FACTS = EngineFacts(2000, 8, 256, {}, {}, 0)


def request(**sampling: object):
    return to_request(pb.Submit(request_id="a", prompt_ids=[5], sampling=pb.Sampling(**sampling)), MODEL, FACTS)


def test_as_many_stop_tokens_as_the_api_allows() -> None:
    assert len(request(stop_token_ids=range(2, 1026)).sampling.stop_token_ids) == 1025
