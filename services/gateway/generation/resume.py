"""A token stream that outlives its workers.

    ROUTE -> CONNECT -> PREFILL -> STREAM -> DONE
      CONNECT/PREFILL fault        -> ROUTE, worker excluded
      STREAM fault, handoff, stall -> attempt + 1 -> ROUTE with prompt + generated ids
      client gone                  -> Cancel
      time of the whole over       -> Cancel, ApiError
      budget, no worker, poison    -> ApiError

Kept here or above, to survive a worker: the accepted ids, the seed, the detokenizer and the stop strings.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from ryzanstein.v1 import routing_pb2, worker_pb2

from services.common.blockhash import wire_chain
from services.gateway.errors import (
    GRAMMAR_FAILED,
    ApiError,
    deadline_exceeded,
    interrupted,
    invalid,
    no_worker,
    overloaded,
    resumes_exhausted,
    unavailable,
)
from services.gateway.generation.attempt import Attempt, Cause, Interruption, Late, Rejection
from services.gateway.generation.budget import BudgetExhaustedError, ResumeBudget
from services.gateway.generation.poison import Broken, PoisonDetector
from services.gateway.generation.request import GenerationRequest, spans_of
from services.gateway.generation.takeover import Takeovers
from services.gateway.generation.tokens import FinishReason, Takeover, TokenBatch
from services.gateway.spans import name_generation, note
from services.gateway.telemetry import Resumed
from services.gateway.upstream.connection import WorkerConnection, WorkerPool, WorkerUnreachableError
from services.gateway.upstream.router import Assignment, NoWorkerError, RouterClient

log = logging.getLogger(__name__)

Result = routing_pb2.Outcome

_FAULTS = (Cause.CONNECTION_LOST, Cause.STALL, Cause.PROTOCOL, Cause.FAILED)
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Limits of interruptions, and of a worker's silence about a request."""

    max_faults: int = 3
    max_handoffs: int = 32
    deadline_s: float = 30.0
    stall_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """The parts that every stream shares."""

    router: RouterClient
    pool: WorkerPool
    budget: ResumeBudget
    policy: ResumePolicy
    on_resume: Callable[[Cause], None] = field(default=lambda cause: None)
    on_resumed: Callable[[Resumed], None] = field(default=lambda resumed: None)


@dataclass(slots=True)
class _Running:
    attempt: Attempt
    connection: WorkerConnection
    submitted_at: float
    trial: bool
    first_token_at: float = 0.0


class ResumableStream:
    """A :class:`TokenSource` that continues on another worker when one is lost."""

    def __init__(self, request: GenerationRequest, upstream: Upstream) -> None:
        self._request = request
        self._upstream = upstream
        self._sampling = request.options.to_proto()
        self._generated: list[int] = []
        self._last_token_at = 0.0  # event-loop time
        self._running: _Running | None = None
        self._placed = False  # whether its group counts it as placed on a worker
        self._attempts = 0
        self._lost_by = ""  # the last cause
        self._faults = 0
        self._handoffs = 0
        self._excluded: set[str] = set()
        self._poison = PoisonDetector()
        self._takeovers = Takeovers(request, lambda: upstream.router.listed)
        self._resume_by = 0.0  # end of the search for another worker; 0 while there is none
        self._done = False
        self.cached_tokens = 0

    async def next(self) -> TokenBatch:
        """See :class:`TokenSource`."""
        while True:
            running = self._running or await self._start()
            batch, end = await running.attempt.take(), running.attempt.end
            if batch.ids:
                self._accept(running, batch)
            if isinstance(end, FinishReason):
                batch.finish = end
                self._finish(running)
                return batch
            if batch.ids:
                return batch
            if isinstance(end, Rejection):
                self._reject(running, end.error)
            elif isinstance(end, Interruption):
                self._interrupted(running, end)
            elif isinstance(end, Late):
                self._leave()
                self._report(running, Result.RESULT_CANCELLED)
                raise self._late(running.attempt.computed_tokens)

    def close(self, *, complete: bool = False) -> None:
        """See :class:`TokenSource`."""
        running = self._leave()
        if running is not None and not self._done:
            running.connection.cancel(self._request.request_id)
            self._report(running, Result.RESULT_OK if complete else Result.RESULT_CANCELLED)
        self._done = True

    # --- one attempt -----------------------------------------------------------------------------------------------

    async def _start(self) -> _Running:
        """ROUTE and CONNECT until an attempt is submitted, while the request has time left."""
        deadline = self._request.caller.deadline
        limit = None if deadline is None else asyncio.timeout_at(deadline)
        try:
            async with limit or nullcontext():
                if self._generated or self._group_runs():
                    return await self._search()
                return await self._takeovers.bound(self._search, self._excluded)
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            raise self._late() from None

    async def _search(self) -> _Running:
        if self._poison.convicted:
            await self._judge()
        pause = _FIRST_PAUSE_S
        while True:
            try:
                assignment = await self._route()
                connection = await self._upstream.pool.get(assignment.ref)
                if self._attempts:
                    patience_s = self._resume_by - asyncio.get_running_loop().time()
                    await self._upstream.budget.admit(assignment.ref.worker_id, self._prefill_tokens(), patience_s)
                self._running = self._submit(assignment, connection)
                return self._running
            except WorkerUnreachableError as error:
                self._leave()
                self._takeovers.unserved = True
                self._unreachable(assignment, error)
            except BudgetExhaustedError as error:
                raise self._failed(resumes_exhausted(error.retry_after_s)) from error
            except NoWorkerError as error:
                self._takeovers.unserved = error.pool_empty
                self._may_wait(error)
                # A worker that failed may return under its name before another one is found.
                self._excluded.clear()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _route(self) -> Assignment:
        group, route, patience = self._request.group, self._upstream.router.route, self._request.caller.patience
        patience = replace(patience, until=self._resume_by) if self._attempts else patience
        patience = self._takeovers.shorten(patience)
        if group is None:
            return await route(self._route_request(), patience)
        async with nullcontext() if self._attempts else group.looking:
            assignment = await route(self._route_request(), patience)
        self._placed = True
        group.placed()
        return assignment

    def _submit(self, assignment: Assignment, connection: WorkerConnection) -> _Running:
        request, policy = self._request, self._upstream.policy
        self._attempts += 1
        trial_tokens = self._poison.trial_tokens
        attempt = Attempt(
            self._attempts,
            len(self._generated),
            stall_s=policy.stall_s,
            deadline=math.inf if request.caller.deadline is None else request.caller.deadline,
            on_trial=trial_tokens > 0,
        )
        submit = worker_pb2.Submit(
            request_id=request.request_id,
            attempt=self._attempts,
            prompt_ids=request.prompt_ids,
            generated_ids=self._generated,
            sampling=self._sampling,
            tenant=request.caller.tenant,
            priority=request.caller.priority,
            cache_salt=request.caller.tenant,
            embed=request.embed,
            second_from=request.second_from,
            prediction_ids=request.prediction_ids,
            images=request.images,
            traceparent=request.caller.traceparent,
            ticket=assignment.ticket,
            weight=request.caller.weight,
            pull=assignment.pull,
            standby=None if request.caller.mirrored else assignment.standby,
            trial_tokens=trial_tokens,
            adapter=request.adapter,
        )
        connection.submit(submit, attempt)
        self._resume_by = 0.0  # the search is over
        name_generation(request.request_id)
        note("submitted", worker=assignment.ref.worker_id, attempt=self._attempts, reason=assignment.reason)
        return _Running(attempt, connection, asyncio.get_running_loop().time(), assignment.trial)

    def _route_request(self) -> routing_pb2.RouteRequest:
        request, hashes = self._request, self._request.block_hashes
        if self._generated:
            ids = request.prompt_ids + self._generated
            hashes = wire_chain(request.model.card.hash_root, request.caller.tenant, ids, spans_of(request.images))
        return routing_pb2.RouteRequest(
            request_id=request.request_id,
            model=request.model.pool,
            block_hashes=hashes,
            prompt_tokens=self._prefill_tokens(),
            max_tokens=max(1, request.options.max_tokens - len(self._generated)),
            session=request.caller.session,
            tenant=request.caller.tenant,
            priority=request.caller.priority,
            attempt=self._attempts + 1,
            excluded_workers=sorted(self._excluded),
            adapter=request.model.adapter.digest if request.model.adapter else "",
            keep_alive_s=request.caller.keep_alive_s,
        )

    def _prefill_tokens(self) -> int:
        return len(self._request.prompt_ids) + len(self._generated)

    def _leave(self) -> _Running | None:
        """Give the worker up; returns the attempt that ran there."""
        running, self._running = self._running, None
        if self._placed and self._request.group is not None:
            self._placed = False
            self._request.group.left(asyncio.get_running_loop().time())
        return running

    # --- after the attempt --------------------------------------------------------------------------------------------

    def _accept(self, running: _Running, batch: TokenBatch) -> None:
        now: float = asyncio.get_running_loop().time()
        resume = ""
        if self._generated and not running.first_token_at:
            model = self._request.model
            resume = model.resume
            self._upstream.on_resumed(Resumed(model.name, resume, now - self._last_token_at, len(self._generated)))
        self._last_token_at = now
        self._generated += batch.ids
        self._poison.progressed(len(self._generated))
        if not running.first_token_at:
            running.first_token_at = now
            batch.takeover = Takeover(running.connection.ref.worker_id, running.attempt.number, self._lost_by, resume)
            self._faults = 0  # tokens are flowing again: the budget is for one outage, not for a whole stream
            if running.trial:
                self._report(running, Result.RESULT_BEGUN)
            if running.attempt.number == 1:
                self.cached_tokens = running.attempt.cached_tokens

    def _finish(self, running: _Running) -> None:
        self._leave()
        self._done = True
        self.cached_tokens = self.cached_tokens or running.attempt.cached_tokens
        self._report(running, Result.RESULT_OK)

    def _reject(self, running: _Running, error: worker_pb2.RequestError) -> None:
        self._leave()
        self._done = True
        self._report(running, Result.RESULT_REJECTED, error.message)
        if error.code == worker_pb2.RequestError.CODE_INTERNAL:
            raise interrupted(error.message)
        if error.code == worker_pb2.RequestError.CODE_GRAMMAR:
            raise invalid(f"The text could not be kept to its grammar: {error.message}", None, GRAMMAR_FAILED)
        code = "context_length_exceeded" if error.code == worker_pb2.RequestError.CODE_TOO_LONG else "invalid_value"
        raise invalid(error.message, error.field.removeprefix("sampling.") or None, code)

    def _interrupted(self, running: _Running, end: Interruption) -> None:
        """Prepare the next attempt, or raise when this request may not have one."""
        self._leave()
        ref = running.connection.ref
        if end.cause is Cause.PROTOCOL:
            running.connection.cancel(self._request.request_id)
        self._report(running, Result.RESULT_HANDOFF if end.handoff else Result.RESULT_FAULT, end.detail)
        if end.death and running.attempt.begun:
            alone = running.attempt.on_trial and self._poison.trial_tokens > 0
            broken = Broken(ref, asyncio.get_running_loop().time()) if end.cause is Cause.CONNECTION_LOST else None
            gave = running.first_token_at > 0
            self._poison.died(len(self._generated), alone=alone, gave=gave, supposed_by=broken)
        self._handoffs += end.handoff
        # A worker that was lost before it began a suspect counts neither against it nor as a fault.
        self._faults += running.attempt.begun and end.cause in _FAULTS
        self._count(end.cause, ref.worker_id, end.detail)

    def _unreachable(self, assignment: Assignment, error: WorkerUnreachableError) -> None:
        ref, name = assignment.ref, self._request.request_id
        fault = routing_pb2.Outcome(request_id=name, worker_id=ref.worker_id, incarnation=ref.incarnation)
        fault.result, fault.detail = Result.RESULT_FAULT, str(error)
        self._upstream.router.report(fault)
        self._count(Cause.CONNECT, ref.worker_id, str(error))

    def _count(self, cause: Cause, worker_id: str, detail: str) -> None:
        # A try of an unreachable worker computed nothing, so that only the deadline limits their number.
        self._excluded.add(worker_id)
        self._lost_by = str(cause)
        policy, now = self._upstream.policy, asyncio.get_running_loop().time()
        self._resume_by = self._resume_by or now + policy.deadline_s
        self._upstream.on_resume(cause)
        log.info(
            "request interrupted on %s after %d tokens: %s, %s", worker_id, len(self._generated), cause, detail,
            extra={"generation_id": self._request.request_id},
        )  # fmt: skip
        note("interrupted", worker=worker_id, cause=str(cause), tokens=len(self._generated))
        if self._request.caller.mirrored:
            raise self._failed(interrupted("A mirrored request is not resumed.", str(cause)))
        if self._poison.convicted:
            return  # it is judged before the next attempt
        if now >= self._resume_by:
            raise self._failed(unavailable(f"No worker could be reached in time, last: {detail}"))
        if self._faults > policy.max_faults or self._handoffs > policy.max_handoffs:
            raise self._failed(interrupted(f"The request was interrupted too often, last by {cause}: {detail}"))

    async def _judge(self) -> None:
        """Raise for a request whose workers have died; forgive it the deaths of those that live behind a cut line."""
        for broken in self._poison.supposed:
            if await self._upstream.router.outlives(broken.worker, broken.at):
                self._poison.outlived(broken)
        if self._poison.convicted:
            log.warning(
                "poison: workers died computing this request, it is ended",
                extra={"generation_id": self._request.request_id, "tenant": self._request.caller.tenant},
            )
            raise self._failed(interrupted("Workers failed repeatedly while computing this request.", "poison"))
        self._resume_by = asyncio.get_running_loop().time() + self._upstream.policy.deadline_s

    def _may_wait(self, error: NoWorkerError) -> None:
        """Return while a worker may still be found for a request that had one, or whose group has one; else raise."""
        taken_over = not self._generated and error.pool_empty and self._takeovers.without_worker
        if self._group_runs() or (asyncio.get_running_loop().time() < self._resume_by and not taken_over):
            return
        if error.pool_empty:
            raise self._failed(no_worker(self._request.model.name, error.retry_after_s)) from error
        message = f"All workers are busy: {error}"
        raise self._failed(overloaded(message, error.retry_after_s)) from error

    def _group_runs(self) -> bool:
        now, group = asyncio.get_running_loop().time(), self._request.group
        return group is not None and group.going_on(now, self._upstream.policy.deadline_s)

    def _late(self, computed_tokens: int = 0) -> ApiError:
        limit_s, n_tokens = self._request.caller.time_limit_s, self._prefill_tokens()
        return self._failed(deadline_exceeded(limit_s, len(self._generated), min(computed_tokens, n_tokens), n_tokens))

    def _failed(self, error: ApiError) -> ApiError:
        self._done = True
        return error

    def _report(self, running: _Running, result: routing_pb2.Outcome.Result, detail: str = "") -> None:
        ttft_s = running.first_token_at - running.submitted_at if running.first_token_at else 0.0
        ref = running.connection.ref
        self._upstream.router.report(
            routing_pb2.Outcome(
                request_id=self._request.request_id,
                worker_id=ref.worker_id,
                incarnation=ref.incarnation,
                result=result,
                detail=detail,
                ttft_ms=ttft_s * 1000,
                prompt_tokens=len(self._request.prompt_ids),
                cached_tokens=running.attempt.cached_tokens,
                completion_tokens=len(self._generated),
            )
        )
