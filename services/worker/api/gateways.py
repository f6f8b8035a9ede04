"""The gateways that are connected: their requests go to the engine, or are answered at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.spans import RequestSpans
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.api.submits import to_request, unchecked
from services.worker.engine.base import Engine
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import EngineRequest

log = logging.getLogger(__name__)


class Gateways:
    """Their streams, and what they ask for."""

    def __init__(self, engine: Engine, handed_off: Callable[[pb.Handoff.Reason], None]) -> None:
        """`handed_off` is called for every request that is left to another worker."""
        self._engine, self._handed_off = engine, handed_off
        self.closed = False  # streams end once they are empty
        self._spans = RequestSpans()
        self._buffers: set[StreamBuffer] = set()

    def connect(self) -> StreamBuffer:
        """A gateway opened its stream."""
        buffer = StreamBuffer(self._spans, self._handed_off)
        self._buffers.add(buffer)
        return buffer

    def submit(self, buffer: StreamBuffer, submit: pb.Submit) -> None:
        """Take a request on, or answer at once why not."""
        if (handoff := self._engine.refusal()) is not None:
            buffer.hand_off(self._begin(unchecked(submit), submit), handoff)
        else:
            self.cancel(buffer, submit.request_id)  # a gateway that submits again has given the earlier attempt up
            self._take_on(buffer, submit)
        buffer.flush(0)
        self._engine.changes.announce()

    def cancel(self, buffer: StreamBuffer, request_id: str) -> None:
        """Forget a request; an unknown one has ended already."""
        request = buffer.live.pop(request_id, None)
        if request is not None:
            self._engine.cancel(request)
            self._spans.end(request, "cancelled")

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

    def _take_on(self, buffer: StreamBuffer, submit: pb.Submit) -> None:
        assert self._engine.facts is not None, "an engine that takes requests has started"
        try:
            request = to_request(submit, self._engine.model, self._engine.facts)
        except InvalidRequestError as error:
            buffer.refuse(self._begin(unchecked(submit), submit), error)
            return
        self._begin(request, submit)
        try:
            self._engine.submit(request, buffer)
        except InvalidRequestError as error:
            buffer.refuse(request, error)
        else:
            buffer.live[request.request_id] = request

    def _begin(self, request: EngineRequest, submit: pb.Submit) -> EngineRequest:
        self._spans.begin(request, submit.traceparent)
        return request
