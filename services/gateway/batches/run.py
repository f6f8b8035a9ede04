"""Runs a job, resuming it where the last gateway stopped.

    validating -> in_progress -> finalizing -> completed
        |             |  \\-- cancelling ------> cancelled
        |             \\----- time is over ---> expired
        \\-- the file cannot be run ----------> failed

Each line of the input is written exactly once, to the output or to the error file, even when gateways fail.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from services.common.jobs.claim import Claim
from services.common.tasks import end_tasks, wait_for_event
from services.gateway.api.ignored import IGNORED_HEADER
from services.gateway.asgi import ASGIApp
from services.gateway.batches.files import FileGoneError
from services.gateway.batches.lines import Inspector, Line, inspect_whole, numbered_lines, read_line, streams
from services.gateway.batches.objects import BatchError, File, Plan, Status
from services.gateway.batches.requests import LineAnswer, answer_of
from services.gateway.batches.store import BatchStore, Outcome
from services.gateway.errors import ApiError, invalid
from services.gateway.ids import new_id
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.tenants.tenant import Gate

log = logging.getLogger(__name__)
T = TypeVar("T")

_AGAIN_S = 0.5  # between tries while Redis is away
_ROOM_S = 2.0  # between tries while storage is full
_LONGEST_PAUSE_S = 60.0
_PATIENCE_S = 600.0  # how long a line is retried against its tenant's limits
_AT_ONCE = 500  # lines per write when a batch ends early
MOST_REQUESTS = 50_000  # OpenAI's limit
_REASONS = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The resources that all jobs of a gateway share."""

    store: BatchStore
    routes: ASGIApp
    gate: Gate
    slots: asyncio.Semaphore
    concurrency: int
    max_line_bytes: int
    metrics: GatewayMetrics


class BatchRun:
    """Runs a claimed job."""

    def __init__(self, claim: Claim, context: BatchContext, stopping: asyncio.Event) -> None:
        """`stopping` is set when this gateway ends; another gateway then continues the job."""
        self._claim = claim
        self._context = context
        self._store = context.store
        self._stopping = stopping
        self._ending = asyncio.Event()  # set when no further line may begin
        self.status: Status = "validating"

    def on_status(self, status: Status) -> None:
        """Adopt a status that Redis returned."""
        self.status = status
        if status == "cancelling":
            self._ending.set()

    async def renew(self) -> None:
        """See :class:`ClaimedRun`."""
        self.on_status(await self._store.renew(self._claim))

    async def leave(self) -> None:
        """See :class:`ClaimedRun`."""
        await self._store.renew(self._claim, give_up=True)

    async def run(self) -> None:
        """Run until the job or this gateway ends; raises :class:`LostClaimError`."""
        plan, self.status = await self._patiently(lambda: self._store.load(self._claim))
        try:
            file = await self._patiently(lambda: self._store.files.get(self._claim.tenant, plan.input_file_id))
            await self._run(plan, file)
        except (FileGoneError, ApiError):
            message = f"The input file {plan.input_file_id} was deleted."
            await self._finish(plan, "failed", [BatchError(code="input_file_gone", message=message)])

    async def _run(self, plan: Plan, file: File) -> None:
        if self.status == "validating" and not self._late(plan):
            await self._validate(plan, file)
        if self.status == "in_progress" and not self._late(plan):
            await self._answer_lines(plan, file)
        if self._stopping.is_set() or self.status == "failed":
            return
        if self.status == "in_progress" and not self._late(plan):
            self.on_status(await self._patiently(lambda: self._advance("in_progress", "finalizing")))
        if self.status == "finalizing":
            await self._finish(plan, "completed")
        else:
            await self._end_early(plan, file, "cancelled" if self.status == "cancelling" else "expired")

    async def _validate(self, plan: Plan, file: File) -> None:
        inspector = Inspector(plan.endpoint, MOST_REQUESTS, self._context.max_line_bytes)
        async for number, data in self._lines(plan, file):
            if not inspector.look(number, data):
                break
            if number % 100 == 0:
                await asyncio.sleep(0)  # let other tasks run
        if errors := inspect_whole(inspector):
            await self._finish(plan, "failed", errors)
            return
        self.on_status(await self._patiently(lambda: self._advance("validating", "in_progress", total=inspector.total)))

    async def _answer_lines(self, plan: Plan, file: File) -> None:
        """Run the unwritten lines, several at a time."""
        lines = _Shared(self._unwritten(plan, file))
        places = await self._places(plan)
        workers = [asyncio.create_task(self._work(plan, lines)) for _ in range(places)]
        clock = asyncio.create_task(self._end_in_time(plan))
        try:
            await asyncio.gather(*workers)
        finally:
            await end_tasks([*workers, clock])

    async def _places(self, plan: Plan) -> int:
        """How many lines run at once: at most half of the tenant's concurrency, so that its users keep the rest."""
        try:
            most = (await self._context.gate.of_credential(plan.credential)).max_concurrent
        except ApiError:
            return 1  # each line will get this error
        return min(self._context.concurrency, max(1, most // 2)) if most else self._context.concurrency

    async def _end_in_time(self, plan: Plan) -> None:
        await asyncio.sleep(max(0.0, plan.expires_at - time.time()))
        self._ending.set()

    async def _work(self, plan: Plan, lines: _Shared) -> None:
        while not (self._ending.is_set() or self._stopping.is_set()):
            taken = await lines.next()
            if taken is None:
                return
            outcome = await self._answered(plan, *taken)
            if outcome is not None:
                await self._write(plan, outcome)

    async def _answered(self, plan: Plan, number: int, data: bytes) -> Outcome | None:
        """A line's outcome; None when the job ended before the line did."""
        line = read_line(data)
        if streams(line):
            error = invalid("`stream` is not available in a batch.", "stream", "unsupported_field")
            return _outcome(
                number, line, new_id("req"), LineAnswer(error.status, {}, msgspec.json.encode(error.body()))
            )
        ending = asyncio.create_task(self._ending.wait())
        running = asyncio.create_task(self._run_line(plan, number, line))
        try:
            await asyncio.wait([ending, running], return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            await end_tasks([ending, running])

    async def _run_line(self, plan: Plan, number: int, line: Line) -> Outcome | None:
        began, pause_s = time.monotonic(), 0.5
        while True:
            async with self._context.slots:
                if self._stopping.is_set():
                    return None
                request_id = new_id("req")
                # A separate task has its own context, which holds the request's log fields and trace.
                asking = answer_of(self._context.routes, plan.endpoint, plan.credential, request_id, bytes(line.body))
                answer = await asyncio.create_task(asking)
            patient = not answer.limited or time.monotonic() - began < _PATIENCE_S
            if not (answer.later and patient):
                return _outcome(number, line, request_id, answer)
            self._context.metrics.batch_requests.labels("postponed").inc()
            pause_s = min(_LONGEST_PAUSE_S, max(2 * pause_s, answer.retry_after_s))
            await wait_for_event(self._stopping, pause_s * random.uniform(0.5, 1.0))

    async def _write(self, plan: Plan, outcome: Outcome) -> None:
        """Write a line; waits while storage is full."""
        while True:
            status = await self._patiently(lambda: self._store.record(self._claim, plan, [outcome]))
            if status is not None:
                self._context.metrics.batch_requests.labels(outcome.kind).inc()
                self.on_status(status)
                return
            if self._ending.is_set() or self._stopping.is_set():
                return
            log.warning("no room for the answers of batch %s: waiting", self._claim.job_id)
            await wait_for_event(self._stopping, _ROOM_S)

    async def _end_early(self, plan: Plan, file: File, status: Status) -> None:
        """Write an error for each line that has not run, then end the job."""
        code, message = _REASONS[status]
        written = await self._patiently(lambda: self._store.written(self._claim))
        total, outcomes = 0, list[Outcome]()
        async for number, data in self._lines(plan, file):
            total += 1
            if _has(written, number):
                continue
            line = {
                "id": new_id("batch_req"), "custom_id": _custom_id(data), "line": number, "response": None,
                "error": {"code": code, "message": message},
            }  # fmt: skip
            outcomes.append(Outcome(number, "failed", msgspec.json.encode(line) + b"\n"))
            if len(outcomes) == _AT_ONCE:
                await self._write_all(plan, outcomes)
                outcomes = []
        if outcomes:
            await self._write_all(plan, outcomes)
        await self._finish(plan, status, total=total)

    async def _write_all(self, plan: Plan, outcomes: Sequence[Outcome]) -> None:
        await self._patiently(lambda: self._store.record(self._claim, plan, outcomes, beyond_limits=True))

    async def _finish(self, plan: Plan, status: Status, errors: Sequence[BatchError] = (), **fields: int) -> None:
        await self._patiently(lambda: self._store.finish(self._claim, plan, status, errors, **fields))
        self.status = status
        self._context.metrics.batches.labels(status).inc()
        log.info("batch %s: %s", self._claim.job_id, status)

    # --- reading ---------------------------------------------------------------------------------------------------

    async def _advance(self, before: Status, after: Status, **fields: int) -> Status:
        return await self._store.advance(self._claim, before, after, **fields)

    async def _unwritten(self, plan: Plan, file: File) -> AsyncIterator[tuple[int, bytes]]:
        written = await self._patiently(lambda: self._store.written(self._claim))
        async for number, data in self._lines(plan, file):
            if not _has(written, number):
                yield number, data

    async def _lines(self, plan: Plan, file: File) -> AsyncIterator[tuple[int, bytes]]:
        """All lines, each once, across outages of Redis; raises :class:`FileGoneError`."""
        last = 0
        while True:
            try:
                async for number, data in numbered_lines(
                    self._store.files, self._claim.tenant, plan.input_file_id, file.bytes
                ):
                    if number > last:
                        last = number
                        yield number, data
            except RedisAwayError:
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    def _late(self, plan: Plan) -> bool:
        return time.time() >= plan.expires_at

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Retry an operation until Redis answers."""
        while True:
            try:
                return await operation()
            except RedisAwayError:
                await asyncio.sleep(_AGAIN_S)


class _Shared:
    """An iterator of lines that several tasks share."""

    def __init__(self, lines: AsyncIterator[tuple[int, bytes]]) -> None:
        self._lines = lines
        self._lock = asyncio.Lock()

    async def next(self) -> tuple[int, bytes] | None:
        """The next line, if there is one."""
        async with self._lock:
            return await anext(self._lines, None)


def _has(bits: bytes, number: int) -> bool:
    """Whether bit `number` of a Redis bitmap is set; the most significant bit of a byte comes first."""
    byte, bit = divmod(number, 8)
    return byte < len(bits) and bool(bits[byte] & (0x80 >> bit))


def _custom_id(data: bytes) -> str | None:
    """The line's `custom_id`; None for an invalid line, in a batch that ended before its validation."""
    try:
        return read_line(data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _outcome(number: int, line: Line, request_id: str, answer: LineAnswer) -> Outcome:
    response = {"status_code": answer.status, "request_id": request_id, "body": msgspec.Raw(answer.body)}
    if ignored := answer.headers.get(IGNORED_HEADER.encode()):
        response["ignored"] = ignored.decode()
    where = {} if answer.ok else {"line": number}
    written = {"id": new_id("batch_req"), "custom_id": line.custom_id, **where, "response": response, "error": None}
    data = msgspec.json.encode(written) + b"\n"
    return Outcome(number, "completed" if answer.ok else "failed", data, answer.tokens())
