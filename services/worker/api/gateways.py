"""The gateways that are connected: their requests go to the engine, or are answered at once."""

from __future__ import annotations

import logging

from opentelemetry import trace
from opentelemetry.trace import Span
from ryzanstein.v1 import worker_pb2 as pb

from services.common.tracing import remote_context
from services.worker.api.card import WorkerModel
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.api.submits import InvalidSubmitError, to_request
from services.worker.engine.base import RunningRequest
from services.worker.engine.loop import EngineLoop
from services.worker.scheduling.admission import TooLongError

log = logging.getLogger(__name__)


class Gateways:
    """Their streams, and what they ask for."""

    def __init__(self, engine: EngineLoop, model: WorkerModel) -> None:
        self._engine, self._model = engine, model
        self.closed = False  # streams end once they are empty
        self._tracer = trace.get_tracer("ryzanstein.worker")
        self._buffers: set[StreamBuffer] = set()

    def connect(self) -> StreamBuffer:
        """A gateway opened its stream."""
        buffer = StreamBuffer()
        self._buffers.add(buffer)
        return buffer

    def submit(self, buffer: StreamBuffer, submit: pb.Submit) -> None:
        """Take a request on, or answer at once why not."""
        running = RunningRequest(buffer, submit.request_id, submit.attempt, self._span(submit))
        if (handoff := self._engine.refusal()) is not None:
            self._engine.hand_off(running, handoff)
        else:
            self.cancel(buffer, submit.request_id)  # a gateway that submits again has given the earlier attempt up
            try:
                self._take_on(running, buffer, submit)
            except InvalidSubmitError as error:
                _refuse(buffer, running, pb.RequestError.CODE_INVALID_ARGUMENT, error.field, str(error))
            except TooLongError as error:
                _refuse(buffer, running, pb.RequestError.CODE_TOO_LONG, error.field, str(error))
        self._engine.changes.announce()

    def cancel(self, buffer: StreamBuffer, request_id: str) -> None:
        """Forget a request; an unknown one has ended already."""
        request = buffer.live.pop(request_id, None)
        if request is not None:
            self._engine.cancel(request)

    def drop(self, buffer: StreamBuffer) -> None:
        """A gateway's stream is over: so are its requests."""
        if buffer.live:
            log.info("stream of gateway %s ended, %d requests cancelled", buffer.gateway_id, len(buffer.live))
        for request_id in list(buffer.live):
            self.cancel(buffer, request_id)
        self._buffers.discard(buffer)

    def close(self) -> None:
        """Let every stream end after what it still has to tell."""
        self.closed = True
        for buffer in self._buffers:
            buffer.wake()
        self._engine.changes.announce()

    def _take_on(self, running: RunningRequest, buffer: StreamBuffer, submit: pb.Submit) -> None:
        assert self._engine.started is not None
        request = to_request(submit, self._model.limits(self._engine.started))
        self._engine.submit(request, running, submit.pull if submit.HasField("pull") else None)
        buffer.live[running.request_id] = request

    def _span(self, submit: pb.Submit) -> Span:
        """The worker's part of the request's trace; costs nothing while tracing is off."""
        return self._tracer.start_span(
            "worker.request",
            context=remote_context((("traceparent", submit.traceparent),)) if submit.traceparent else None,
            attributes={
                "ryzanstein.generation_id": submit.request_id,
                "ryzanstein.attempt": submit.attempt,
                "ryzanstein.prompt_tokens": len(submit.prompt_ids),
            },
        )


def _refuse(
    buffer: StreamBuffer, running: RunningRequest, code: pb.RequestError.Code, field: str, message: str
) -> None:
    buffer.refuse(running, pb.RequestError(code=code, field=field, message=message))
    buffer.flush(0)
