"""The outputs that wait to be sent to one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from ryzanstein.v1 import worker_pb2 as pb

from services.compute.token_logprobs import TokenLogprobs
from services.worker.api.spans import RequestSpans
from services.worker.engine.errors import InvalidRequestError, TooLongError
from services.worker.engine.output import MODEL, Finish, Output, Progress
from services.worker.engine.request import EngineRequest

_FAILURE = {"grammar": pb.RequestError.CODE_GRAMMAR, MODEL: pb.RequestError.CODE_INTERNAL}
_FINISH = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.EMBEDDED: pb.FINISH_REASON_STOP,
}


class StreamBuffer:
    """Builds the next message to a gateway.

    Outputs of further steps are merged into it until the message before it is written. So a slow reader gets fewer,
    larger messages, and its requests' tokens bound the memory. With `merge_s` a message begins so long after the one
    before, unless a first token, an end or a heartbeat is in it: quick steps share a message. Implements OutputSink.
    """

    def __init__(
        self,
        spans: RequestSpans,
        handed_off: Callable[[pb.Handoff.Reason], None],
        progress: Callable[[EngineRequest], Progress],
        merge_s: float = 0.0,
    ) -> None:
        self._merge_s, self._sent_at = merge_s, -math.inf
        self._spans, self._handed_off, self._progress = spans, handed_off, progress
        self.gateway_id = ""
        self.live: dict[str, EngineRequest] = {}  # by request id
        self.heartbeat_s = 0.0  # 0: no heartbeats
        self._spoke = False  # whether a message was sent since the last heartbeat was due
        self._message = pb.StepOutputs()
        self._open: dict[EngineRequest, pb.Output] = {}
        self._moved: dict[EngineRequest, pb.Progress] = {}  # in the next message
        self._answered: set[EngineRequest] = set()  # with outputs in messages since the last heartbeat was due
        self._seen: dict[EngineRequest, Progress] = {}  # progress of the other requests at the last heartbeat
        self._ready = asyncio.Event()
        self._urgent = asyncio.Event()  # the message does not wait for further steps

    def add(self, request: EngineRequest, output: Output) -> None:
        """Append one step's output of one request."""
        message = self._open.get(request)
        if message is None:
            message = self._message.outputs.add(
                request_id=request.request_id,
                attempt=request.attempt,
                first_index=output.first_index,
                ids=output.token_ids,
            )
            self._open[request] = message
        else:
            message.ids.extend(output.token_ids)
        if output.logprobs:
            message.logprobs.extend([_to_proto(row) for row in output.logprobs])
        if output.accepted_prediction or output.rejected_prediction:
            message.accepted_prediction_tokens += output.accepted_prediction
            message.rejected_prediction_tokens += output.rejected_prediction
        if output.prefill is not None:
            message.cached_tokens = output.prefill.cached_tokens
            message.prompt_logprobs.extend([_to_proto(row) for row in output.prefill.prompt_logprobs])
            self._spans.prefilled(request, output.prefill)
            self._urgent.set()
        if output.embedding:
            message.embedding.extend(output.embedding)
        if output.proposed:
            self._spans.verified(request, output.proposed, max(0, len(output.token_ids) - 1))
        if output.finish is not None:
            _write_end(message, request, output.finish, output)
            self._urgent.set()
            self.live.pop(request.request_id, None)
            self._spans.end(request, output.finish.value, output.first_index + len(output.token_ids))

    def announce_trial(self, request: EngineRequest) -> None:
        """Report that the ranks compute a suspect."""
        self._message_of(request).on_trial = True
        self._urgent.set()

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        """Let another worker continue a request."""
        self._handed_off(handoff.reason)
        self._end(request, "handoff").handoff.CopyFrom(handoff)

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        """End a request that no worker can serve."""
        too_long = isinstance(error, TooLongError)
        code = pb.RequestError.CODE_TOO_LONG if too_long else pb.RequestError.CODE_INVALID_ARGUMENT
        refused = pb.RequestError(code=code, field=error.field, message=str(error))
        self._end(request, "refused").error.CopyFrom(refused)

    def flush(self, step: int) -> None:
        """Release the outputs of a complete step for writing."""
        if self._message.outputs:
            self._message.step = max(step, self._message.step)
            self._ready.set()

    def beat(self) -> None:
        """Send a heartbeat, even without outputs."""
        self._message.heartbeat = self._message.reports_progress = True
        self.wake()

    def beat_if_due(self) -> None:
        """Called every `heartbeat_s`: report requests that have moved on; send a heartbeat unless outputs were sent."""
        self._report_progress()
        if self._moved or (self.live and not self._spoke):
            self.beat()
        self._spoke = False

    def _report_progress(self) -> None:
        seen = {one: self._progress(one) for one in self.live.values() if one not in self._answered}
        for request, progress in seen.items():
            if progress == self._seen.get(request) or request in self._open:
                continue
            message = self._moved.get(request)
            if message is None:
                message = self._message.progress.add(request_id=request.request_id, attempt=request.attempt)
                self._moved[request] = message
            message.computed_tokens = progress.computed_tokens
        self._seen = seen
        self._answered.clear()

    def wake(self) -> None:
        """Make `take` return, even without outputs."""
        self._urgent.set()
        self._ready.set()

    async def take(self) -> pb.StepOutputs:
        """Wait for the next message; it has no outputs after `wake` or as a heartbeat."""
        await self._ready.wait()
        await self._merge()
        self._ready.clear()
        self._urgent.clear()
        message, self._message = self._message, pb.StepOutputs()
        self._spoke = True
        self._answered.update(self._open)
        self._open.clear()
        self._moved.clear()
        self._sent_at = time.monotonic()
        return message

    async def _merge(self) -> None:
        """Let outputs of further steps join those that can wait."""
        left_s = self._sent_at + self._merge_s - time.monotonic()
        if left_s > 0 and not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._urgent.wait()

    @property
    def empty(self) -> bool:
        """Whether there are no outputs to write and no live requests."""
        return not self.live and not self._message.outputs

    def _end(self, request: EngineRequest, how: str) -> pb.Output:
        self.live.pop(request.request_id, None)
        self._spans.end(request, how)
        self._urgent.set()
        return self._message_of(request)

    def _message_of(self, request: EngineRequest) -> pb.Output:
        message = self._open.get(request)
        if message is None:
            message = self._message.outputs.add(request_id=request.request_id, attempt=request.attempt)
            self._open[request] = message
        return message


def _write_end(message: pb.Output, request: EngineRequest, finish: Finish, output: Output) -> None:
    """Write why a request ended."""
    if finish is not Finish.FAILED:
        message.finish = _FINISH[finish]
        return
    code, text = _FAILURE.get(output.failed_field, pb.RequestError.CODE_INVALID_ARGUMENT), output.failure
    if output.failed_field == MODEL and request.adapter is not None:  # the caller's, other than a base model
        code, text = pb.RequestError.CODE_INVALID_ARGUMENT, f"adapter {request.adapter.name!r}: {text}"
    message.error.CopyFrom(pb.RequestError(code=code, field=output.failed_field, message=text))


def _to_proto(row: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=row.token_id,
        logprob=row.logprob,
        rank=row.rank,
        top_ids=row.top_ids,
        top_logprobs=row.top_logprobs,
    )
