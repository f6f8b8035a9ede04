"""Users of the public gRPC API, `ryzanstein.v1.Inference`."""

from __future__ import annotations

import grpc
from grpc.experimental import gevent as grpc_gevent
from locust import task
from locust.env import Environment
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from loadtest.timing import AnswerClock
from loadtest.traffic import code_prompt
from loadtest.users.base import Person

_NAME = "Inference/Generate"
_TIMEOUT_S = 60

grpc_gevent.init_gevent()  # before the first channel: otherwise a call blocks all users of this process


class GrpcUser(Person):
    """A service that generates text for another program; --grpc is the address."""

    weight = 1

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._channel = grpc.insecure_channel(environment.parsed_options.grpc)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def on_stop(self) -> None:
        """Close the channel."""
        self._channel.close()

    @task
    def generate(self) -> None:
        """Ask for one streamed continuation."""
        options = inference_pb2.GenerationOptions(max_tokens=48, temperature=0.2, session_id=self.session_id)
        request = inference_pb2.GenerateRequest(prompt=code_prompt(self.rng), options=options)
        clock, size, tokens, error = AnswerClock(), 0, 0, None
        try:
            for response in self._stub.Generate(request, timeout=_TIMEOUT_S):
                if response.text:
                    clock.arrived()
                size += len(response.text.encode())
                tokens += len(response.ids)
        except grpc.RpcError as problem:
            error = problem
        times = clock.times(tokens)
        self.report_request("gRPC", _NAME, times.total, size, error)
        if error is None:
            self.report(_NAME, times)
