"""A sequence as text: detokenized, cut at stop strings, with logprobs that stay with their text."""

from __future__ import annotations

from time import perf_counter

from msgspec import Struct, field
from ryzanstein.v1 import worker_pb2

from services.gateway.errors import ApiError
from services.gateway.generation.held import HeldAnswer
from services.gateway.generation.message import MessageReader
from services.gateway.generation.recording import SequenceRecord
from services.gateway.generation.request import LAST_PRIORITY, GenerationRequest
from services.gateway.generation.request_log import RequestLog
from services.gateway.generation.tokens import FinishReason, Takeover, TokenBatch, TokenSource
from services.gateway.spans import time_first_token
from services.gateway.telemetry import GatewayMetrics
from services.gateway.text.stops import StopBuffer
from services.gateway.tools.calls import CallDelta
from services.gateway.usage import PredictionUsage, Usage, usage_json


class ScoredToken(Struct, frozen=True):
    """A generated token, its logprobs and where its text begins in the sequence."""

    logprobs: worker_pb2.TokenLogprobs
    offset: int


class OutputChunk(Struct):
    """The output of a step. With `finish` it is the last one."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None
    embedding: list[float] = field(default_factory=list)
    reasoning: str = ""
    reasoning_tokens: int = 0  # how many of the ids are reasoning, with the ends of its tags
    calls: list[CallDelta] = field(default_factory=list)
    takeover: Takeover | None = None


class Generation:
    """One sequence. `next` until a chunk with `finish`; `close` in any case."""

    def __init__(
        self,
        request: GenerationRequest,
        source: TokenSource,
        metrics: GatewayMetrics,
        reader: MessageReader | None = None,
        held: HeldAnswer | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """`reader` takes reasoning and calls out of the text; the whole is `held` to a schema."""
        options = request.options
        self._reader = reader
        self._held = held
        self._request_log = request_log
        self.request = request
        self.completion_tokens = 0
        self._prediction = None if request.prediction_ids is None else PredictionUsage()
        self.prompt_logprobs: list[worker_pb2.TokenLogprobs] = []
        self._source = source
        self._metrics = metrics
        self._inter_token = metrics.inter_token.of(request.model.name)
        self._created = self._last = perf_counter()
        self._waiting = False  # for a first batch
        self._begun = False
        self.finish: FinishReason | None = None  # None: not complete
        self._closed = False
        self._recording: SequenceRecord | None = None
        self._detokenizer = request.model.new_detokenizer(
            after=request.prompt_ids, skip_special_tokens=options.skip_special_tokens
        )
        self._stops = StopBuffer(options.stop, include=options.include_stop) if options.stop else None
        self._scored: list[ScoredToken] = []  # tokens with text that is still held back
        self.stopped: str | None = None  # the stop string that cut the text: what was held back is no part of it
        self._sent_chars = 0
        self._token_offset = 0  # where the text of the next token begins

    @property
    def begun(self) -> bool:
        """Whether a worker has answered: from then on its prompt counts as used."""
        return self._begun

    @property
    def usage(self) -> Usage:
        """Tokens used so far, the prompt included."""
        return Usage(len(self.request.prompt_ids), self.completion_tokens, self._source.cached_tokens, self._prediction)

    async def next(self) -> OutputChunk:
        """The next chunk; raises :class:`ApiError` (with the usage so far) when the sequence cannot be completed."""
        if not self._begun:
            self._set_waiting(True)
        try:
            batch = await self._source.next()
        except ApiError as error:
            if self._recording is not None:
                self._recording.fail(error)
            if self.completion_tokens:
                error.usage = usage_json(self.usage)
            raise
        self._measure()
        if batch.prompt_logprobs:
            self.prompt_logprobs = list(batch.prompt_logprobs)
        chunk = self._read(batch)
        self.finish = chunk.finish
        if self._recording is not None:
            self._recording.add(chunk.ids, finished=chunk.finish is not None)
        if self._held is not None:
            await self._hold(self._held, chunk)
        return chunk

    def close(self) -> None:
        """Stop the work if it is not done; count what it used."""
        self._source.close()
        if self._closed:
            return
        self._closed = True
        if self._recording is not None:
            self._recording.ended.set()
        self._set_waiting(False)
        if not self._begun:
            return
        request, usage = self.request, self.usage
        counts = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if request.caller.mirrored:
            self._metrics.count_mirrored(request.model.name, counts)
        else:
            self._metrics.count_tokens(request.model.name, request.caller.tenant, counts)
            self._metrics.count_sequence(request.model.name, self.finish or "abort")
            if self._request_log is not None:
                self._request_log.add(request, usage.completion_tokens, perf_counter() - self._created)

    def record(self) -> SequenceRecord:
        """Keep what it gives from now on."""
        self._recording = SequenceRecord()
        return self._recording

    async def _hold(self, held: HeldAnswer, chunk: OutputChunk) -> None:
        held.add(chunk.text, chunk.calls)
        if chunk.finish in (None, FinishReason.LENGTH) or self.stopped is not None:
            return  # it is not complete
        try:
            await held.check()
        except ApiError as error:
            error.usage = usage_json(self.usage)
            raise

    def _measure(self) -> None:
        now = perf_counter()
        if self._begun:
            self._inter_token.observe(now - self._last)
        else:
            self._begun = True
            self._set_waiting(False)
            time_first_token(now - self._created)
            if self.request.caller.priority < LAST_PRIORITY:  # waits of the last priority say nothing of speed
                self._metrics.observe_ttft(self.request.model.name, now - self._created)
        self._last = now

    def _set_waiting(self, waiting: bool) -> None:
        if waiting is not self._waiting:
            self._waiting = waiting
            self._metrics.waiting.inc(1 if waiting else -1)

    def _read(self, batch: TokenBatch) -> OutputChunk:
        chunk = OutputChunk(finish=batch.finish, embedding=list(batch.embedding), takeover=batch.takeover)
        bordered = self._stops is not None or batch.logprobs or (self._reader is not None and self._reader.reasons)
        pieces = self._read_each(batch, chunk) if bordered else self._read_plain(batch, chunk)
        chunk.text = "".join(pieces)
        self._sent_chars += len(chunk.text)
        if self._prediction is not None:
            self._prediction += _prediction_usage(batch, len(chunk.ids))
        if self._scored:
            chunk.tokens = self._release(final=chunk.finish is not None)
        if self._reader is not None:
            part = self._reader.read(pieces, final=chunk.finish is not None)
            chunk.text, chunk.reasoning, chunk.calls = part.content, part.reasoning, part.calls
            chunk.reasoning_tokens = min(part.reasoning_pieces, len(chunk.ids))  # a last chunk may have no ids
            chunk.finish = chunk.finish and self._reader.finish_of(chunk.finish)
        return chunk

    def _read_plain(self, batch: TokenBatch, chunk: OutputChunk) -> list[str]:
        """Decode all tokens at once: no stop string, log-probability or reasoning needs their borders."""
        ids = chunk.ids = list(batch.ids)
        self.completion_tokens += len(ids)
        silent = batch.finish is FinishReason.STOP and not self.request.options.include_stop
        text = self._detokenizer.push_all(ids[:-1] if silent else ids)
        return [text] if chunk.finish is None else [text, self._flush()]

    def _read_each(self, batch: TokenBatch, chunk: OutputChunk) -> list[str]:
        """The text, token by token: one of them may end it, and each may have its logprobs."""
        parts: list[str] = []
        last = len(batch.ids) - 1
        for position, token_id in enumerate(batch.ids):
            # A stop token ends the sequence and is not part of its text, unless asked for.
            silent = position == last and batch.finish is FinishReason.STOP and not self.request.options.include_stop
            stopped = self._read_token(token_id, silent, parts)
            chunk.ids.append(token_id)
            if batch.logprobs and not silent:
                self._score(batch.logprobs[position], parts)
            if stopped:
                self._source.close(complete=True)
                chunk.finish = FinishReason.STOP
                break
        else:
            if chunk.finish is not None:
                parts[-1:] = ["".join(parts[-1:]) + self._flush()]
        return parts

    def _read_token(self, token_id: int, silent: bool, parts: list[str]) -> bool:
        """Append what the token adds to the text; True when it completed a stop string."""
        self.completion_tokens += 1
        text = "" if silent else self._detokenizer.push(token_id)
        if self._stops is None or self.completion_tokens <= self.request.options.min_tokens:
            parts.append(text)
            return False
        emitted = self._stops.push(text)
        parts.append(emitted.text)
        self.stopped = emitted.stopped
        return self.stopped is not None

    def _flush(self) -> str:
        """The end of the text; a stop string can still be completed by what the detokenizer held back."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        emitted = self._stops.push(rest)
        self.stopped = emitted.stopped
        return emitted.text if self.stopped is not None else emitted.text + self._stops.flush()

    def _score(self, logprobs: worker_pb2.TokenLogprobs, parts: list[str]) -> None:
        self._scored.append(ScoredToken(logprobs, self._token_offset))
        self._token_offset = self._sent_chars + sum(map(len, parts)) + (self._stops.held if self._stops else 0)

    def _release(self, *, final: bool) -> list[ScoredToken]:
        """Logprobs of the tokens whose text has been sent; at the end of all that are part of the text."""
        count = sum(token.offset < self._sent_chars for token in self._scored)
        if final and self.stopped is None:
            count = len(self._scored)
        released, self._scored = self._scored[:count], self._scored[count:]
        return released


def _prediction_usage(batch: TokenBatch, n_kept: int) -> PredictionUsage:
    """Counts of tokens drafted from the prediction; accepted tokens behind a stop string are no part of the text."""
    accepted = min(batch.accepted_prediction, n_kept)
    return PredictionUsage(accepted, batch.rejected_prediction + batch.accepted_prediction - accepted)
