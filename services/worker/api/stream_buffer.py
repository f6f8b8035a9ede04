"""What one gateway has not been told yet."""

from __future__ import annotations

import asyncio

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.spans import prefilled
from services.worker.engine.base import RunningRequest
from services.worker.protocol.plan import TokenLogprobs
from services.worker.scheduling.request import Finish, Output, Request

_FINISH = {
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.EMBEDDED: pb.FINISH_REASON_STOP,
}


class StreamBuffer:
    """One message to a gateway in the making.

    While the message before it is not written, the outputs of further steps are merged into it: a slow reader
    gets fewer and bigger messages, and memory is bounded by the tokens of its requests.
    """

    def __init__(self, gateway_id: str = "") -> None:
        self.gateway_id = gateway_id
        self.live: dict[str, Request] = {}  # by request id
        self.heartbeat_s = 0.0  # 0: not wanted
        self._spoke = False  # since the last beat was due
        self._message = pb.StepOutputs()
        self._open: dict[RunningRequest, pb.Output] = {}
        self._ready = asyncio.Event()

    def add(self, running: RunningRequest, output: Output) -> None:
        """Append one step's output of one request."""
        message = self._open.get(running)
        if message is None:
            message = self._message.outputs.add(
                request_id=running.request_id,
                attempt=running.attempt,
                first_index=output.first_index,
                ids=output.token_ids,
            )
            self._open[running] = message
        else:
            message.ids.extend(output.token_ids)
        if output.logprobs is not None:
            message.logprobs.append(_to_proto(output.logprobs))
        if output.first:
            message.cached_tokens = output.request.cached_tokens
            message.prompt_logprobs.extend([_to_proto(row) for row in output.request.prompt_logprobs])
            running.decode = prefilled(running.span, output.request)
        if output.embedding:
            message.embedding.extend(output.embedding)
        if output.finish is Finish.FAILED:
            error = pb.RequestError(code=pb.RequestError.CODE_GRAMMAR, field="grammar", message=output.failure)
            message.error.CopyFrom(error)
        elif output.finish is not None:
            message.finish = _FINISH[output.finish]
        if output.finish is not None:
            self.live.pop(running.request_id, None)
            running.span.set_attribute("ryzanstein.generated_tokens", output.request.n_generated)
            running.close(output.finish.value)

    def announce_trial(self, running: RunningRequest) -> None:
        """A suspect is being computed."""
        self._message_of(running).on_trial = True

    def hand_off(self, running: RunningRequest, handoff: pb.Handoff) -> None:
        """Let another worker continue a request."""
        running.close("handoff")
        self._end(running).handoff.CopyFrom(handoff)

    def refuse(self, running: RunningRequest, error: pb.RequestError) -> None:
        """End a request that no worker can serve."""
        running.close("refused")
        self._end(running).error.CopyFrom(error)

    def flush(self, step: int) -> None:
        """A step is complete: its outputs may be written."""
        if self._message.outputs:
            self._message.step = max(step, self._message.step)
            self._ready.set()

    def beat(self) -> None:
        """Say that this process is alive, even if there is nothing to say."""
        self._message.heartbeat = True
        self._ready.set()

    def beat_if_due(self) -> None:
        """To be called every `heartbeat_s`: only who runs something here needs to know, and outputs say it, too."""
        if self.live and not self._spoke:
            self.beat()
        self._spoke = False

    def wake(self) -> None:
        """Let `take` return in any case."""
        self._ready.set()

    async def take(self) -> pb.StepOutputs:
        """The next message, once there is one; without outputs only after `wake` or as a heartbeat."""
        await self._ready.wait()
        self._ready.clear()
        message, self._message = self._message, pb.StepOutputs()
        self._spoke = True
        self._open.clear()
        return message

    @property
    def empty(self) -> bool:
        """Nothing to write now, and no request that could bring something."""
        return not self.live and not self._message.outputs

    def _end(self, running: RunningRequest) -> pb.Output:
        self.live.pop(running.request_id, None)
        return self._message_of(running)

    def _message_of(self, running: RunningRequest) -> pb.Output:
        message = self._open.get(running)
        if message is None:
            message = self._message.outputs.add(request_id=running.request_id, attempt=running.attempt)
            self._open[running] = message
        return message


def _to_proto(row: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=row.token_id,
        logprob=row.logprob,
        rank=row.rank,
        top_ids=row.top_ids,
        top_logprobs=row.top_logprobs,
    )
