"""Values of gRPC's float32 fields."""

from __future__ import annotations

from ryzanstein.v1 import inference_pb2

from services.gateway.api.ignored import Ignored
from services.gateway.grpc.bodies import completion_body


def test_numbers_keep_the_spelling_of_clients() -> None:
    options = inference_pb2.GenerationOptions(temperature=0.7, min_p=0.05, repetition_penalty=0.01)
    body = completion_body(inference_pb2.GenerateRequest(model="m", options=options), "x", Ignored())
    assert (body.temperature, body.min_p) == (0.7, 0.05)
    assert body.repetition_penalty == 0.01, "the least that is allowed, and a float32 just below it"
