"""The connected gateways: passes their requests to the engine, or answers them at once."""

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
    """The gateways' streams and requests."""

    def __init__(self, engine: Engine, handed_off: Callable[[pb.Handoff.Reason], None], merge_s: float = 0.0) -> None:
        """`handed_off` is called for every request that is handed off to another worker; `merge_s`: of every stream."""
        self._engine, self._handed_off, self._merge_s = engine, handed_off, merge_s
        self.closed = False  # streams end when they are empty
        self._spans = RequestSpans()
        self._buffers: set[StreamBuffer] = set()

    def connect(self) -> StreamBuffer:
        """Make the buffer of a gateway's new stream."""
        buffer = StreamBuffer(self._spans, self._handed_off, self._engine.progress, self._merge_s)
        self._buffers.add(buffer)
        return buffer

    def submit(self, buffer: StreamBuffer, submit: pb.Submit) -> None:
        """Submit a request to the engine, or answer at once with a handoff or an error."""
        if (handoff := self._engine.refusal()) is not None:
            buffer.hand_off(self._begin(unchecked(submit), submit), handoff)
        else:
            self.cancel(buffer, submit.request_id)  # a gateway that submits again has abandoned the earlier attempt
            self._take_on(buffer, submit)
        buffer.flush(0)
        self._engine.changes.announce()

    def cancel(self, buffer: StreamBuffer, request_id: str) -> None:
        """Cancel a request; does nothing for a request that has ended."""
        request = buffer.live.pop(request_id, None)
        if request is not None:
            self._engine.cancel(request)
            self._spans.end(request, "cancelled")

    def drop(self, buffer: StreamBuffer) -> None:
        """Cancel the requests of a gateway whose stream has ended."""
        if buffer.live:
            log.info("stream of gateway %s ended, %d requests cancelled", buffer.gateway_id, len(buffer.live))
        for request_id in list(buffer.live):
            self.cancel(buffer, request_id)
        self._buffers.discard(buffer)

    def close(self) -> None:
        """Let every stream end after its remaining messages."""
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
