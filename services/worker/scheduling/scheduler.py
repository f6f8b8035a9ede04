"""Plans each step. Pure Python, no torch, no I/O, no threads.

Prompts and decodes differ in nothing: a request has known tokens and planned positions. Each step spends a budget of
rows on decodes, then on running prompts, then on admissions. Step n + 1 is planned while step n is computed, on the
assumption that a request goes on after the token in flight; else the row is discarded. Proposals follow from tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from services.worker.drafting.draft import Draft
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.output import Output
from services.worker.engine.state import EngineCounters
from services.worker.protocol.plan import Chunk, SlotResult, StepPlan, StepResult
from services.worker.scheduling.admission import Capacity, WaitingQueue, fresh_blocks
from services.worker.scheduling.block_pool import BlockPool
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.fairness import CACHED_COST, OUTPUT_COST, PREFILL_COST, TenantLedger
from services.worker.scheduling.places import DEVICE_ONLY, Places
from services.worker.scheduling.preemption import choose_victim
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.prefix_cache import PrefixCache
from services.worker.scheduling.quarantine import Quarantine
from services.worker.scheduling.request import Request, Status
from services.worker.scheduling.speculation import Speculator
from services.worker.scheduling.step_builder import PlannedStep, Slots, StepBuilder
from services.worker.scheduling.transfers import Arrival, BlockTransfers


class Scheduler:
    """All requests of one worker, their blocks and slots.

    Call `submit` and `cancel` at any time, `plan` whenever fewer than `max_in_flight` plans are in flight, and
    `apply` once per plan, in order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        events: KvEventLog,
        counters: EngineCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        places: Places = DEVICE_ONLY,
    ) -> None:
        self.config, self._places = config, places
        self.counters = counters or EngineCounters()
        # The engine sets both from the measured step times.
        self.prefill_budget = PrefillBudget(config.max_batched_tokens)  # for prompts in a step that also decodes
        self.share_min_tokens = 64  # a shorter prefix is computed again, because waiting costs about a step
        self.speculator = Speculator(config, self.counters)
        self._events, self._clock = events, clock
        self._next_step = self._next_arrival = 0
        self._reset()

    def _reset(self) -> None:
        config = self.config
        self._pool = BlockPool(config.n_blocks, config.block_tokens, self._events, self._places)
        positions = config.n_blocks * config.block_tokens if config.caches else config.max_model_len
        self.capacity = Capacity(config.max_model_len, positions)
        self.ledger = TenantLedger()
        self._queue = WaitingQueue(self.ledger, config.age_s)
        self._prefixes = PrefixCache(self._pool, config, self._places)
        self.transfers = BlockTransfers(self._pool, self._prefixes.snapshots)
        self.quarantine = Quarantine()
        self._running: dict[Request, None] = {}  # in order of admission
        self._deferred: dict[Request, None] = {}
        self._lingering: dict[Request, None] = {}  # not running, but a plan in flight refers to their blocks
        self._slots = Slots(config.max_running)
        self._waits = False  # the next plan waits for the result of the one in flight
        self.in_flight: deque[PlannedStep] = deque()  # steps without a result yet, oldest first; others only read it

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The KV blocks; callers only read them."""
        return self._pool

    @property
    def n_running(self) -> int:
        """Number of requests with a slot."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._queue) + len(self._deferred)

    @property
    def queued_prefill_tokens(self) -> int:
        """Number of known tokens that no plan covers yet."""
        deferred = sum(len(request.token_ids) for request in self._deferred)
        running = sum(max(0, len(request.token_ids) - request.n_planned) for request in self._running)
        return self._queue.tokens + deferred + running

    @property
    def idle(self) -> bool:
        """Whether there are no requests and no plans in flight."""
        return not (self._running or self._lingering or self.in_flight or self.n_waiting)

    # -- submission and cancellation -------------------------------------------------------------------------

    def submit(self, request: Request, *, deferred: bool = False) -> None:
        """Queue a request, or hold it until `requeue`; raises TooLongError when an empty pool could not serve it."""
        request.limit = self.capacity.limit(request)
        request.arrival, request.queued_at = self._next_arrival, self._clock()
        self.quarantine.enter(request)
        self._next_arrival += 1
        request.cacheable = request.cacheable and self.config.reuses
        if request.cacheable:
            request.extend_digests()
        request.drafts = self.speculator.open(request)
        self.ledger.enter(request.tenant, request.weight)
        if deferred:
            request.status = Status.DEFERRED
            self._deferred[request] = None
        else:
            self._queue.push(request)

    def requeue(self, request: Request) -> None:
        """Queue a request submitted as deferred, unless it has ended."""
        if request.status is Status.DEFERRED:
            self._wake([request])

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """Publish the next transferred blocks of an arrival."""
        self.transfers.adopt(arrival, n_blocks)
        self._events.flush()

    def cancel(self, request: Request) -> bool:
        """End a request in any state; returns whether it was still alive."""
        if request.status is Status.DONE:
            return False
        if request.status is Status.WAITING:
            self._queue.take(request, Status.DONE)
            self.ledger.leave(request.tenant)
        else:
            self._end(request)
        return True

    def abandon(self) -> list[Request]:
        """Drop all requests and blocks, because the ranks and their KV are lost; returns the requests still alive."""
        alive = [*self._running, *self._deferred, *self._queue]
        alive += [request for request in self._lingering if request.status is Status.RETIRING]
        for request in alive:
            request.status = Status.DONE
        self._reset()
        self._places.cleared()
        self._events.cleared()
        return alive

    # -- planning --------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to compute or when a result has to come first."""
        if len(self.in_flight) >= self.config.max_in_flight:
            return None
        if self.in_flight and (self.in_flight[-1].proposes or self._choose_drafts()):
            self._waits = True  # the tokens in flight are worth waiting for: proposals follow from them
            return None
        waited, self._waits = self._waits, False
        builder = StepBuilder(self.config, self._prefixes.snapshots)
        prefills = self._plan_decodes(builder)
        if builder.work:
            builder.set_prefill_budget(self.prefill_budget)
        self._wake(self._prefixes.expired(self._next_step), patient=False)
        self._plan_prefills(builder, prefills)
        if builder.empty:
            return None
        plan = builder.finish(self._next_step, self._slots.released)
        self._slots.released.clear()
        self.in_flight.append(builder.planned(plan, self._clock(), waited=waited))
        self._next_step += 1
        self._events.flush()
        return plan

    def _choose_drafts(self) -> dict[Request, Draft]:
        """Proposals for the next step; none while prompts wait, or any with whole frames, which need the rows."""
        if not self.config.speculation:
            return {}
        waiting = self.queued_prefill_tokens if self.config.frame_tokens else self._queue.tokens
        return {} if waiting else self.speculator.choose(list(self._running))

    def _plan_decodes(self, builder: StepBuilder) -> list[Request]:
        """Plan the rows of each running request that needs one, and of its proposals; returns those that need more."""
        prefills = []
        drafts = {} if self.in_flight else self._choose_drafts()
        for request in list(self._running):
            if request.prefills:
                prefills.append(request)
                continue
            if request.n_planned + 1 >= request.limit or request not in self._running:
                continue  # its last token is planned, or it was preempted for another's block
            new_blocks: tuple[int, ...] = ()
            full = request.n_planned >= len(request.blocks) * self.config.block_tokens
            if full and not (new_blocks := self._grow(request, builder)):
                continue
            draft = drafts.get(request)
            if draft is None:
                builder.add(request, 1, new_blocks)
            else:
                self.speculator.add(builder, request, draft, new_blocks, self._pool)
        return prefills

    def _plan_prefills(self, builder: StepBuilder, prefills: list[Request]) -> None:
        """Plan running prompts, then admissions.

        The prompt with a frame under way, or the oldest one of the most important priority, gets half of the budget and
        whatever the others leave, so that a long prompt does not starve shorter ones and they do not starve it.
        """
        builder.under_way = next((one for one in (*self._lingering, *prefills) if one.n_layers), None)
        prefills.sort(key=lambda request: (request is not builder.under_way, request.priority, request.arrival))
        held = builder.hold(first := prefills[0] if prefills else None)
        for request in prefills[1:]:
            if builder.open and request.status is Status.RUNNING:
                self._plan_chunk(builder, request)
        if (suspect := self.quarantine.next_up()) is not None:
            self._wake([suspect])
        if not builder.pressed:
            self._admit_waiting(builder)
        builder.resume(held)
        if first is not None and builder.open and first.status is Status.RUNNING:
            self._plan_chunk(builder, first)

    def _plan_chunk(self, builder: StepBuilder, request: Request) -> None:
        """Plan as many of the known tokens as the budget allows; the admission allocated their blocks."""
        start, known = request.n_planned, len(request.token_ids)
        end = start + builder.encode(request, known - start)
        if start == end:
            return  # a frame is not encoded to the end, or has no room
        new_blocks = tuple(request.blocks) if start == request.n_begun else ()
        builder.add_prompt(request, end - start, new_blocks, ends=end == known)
        self.counters.prefill_tokens += end - start
        self.ledger.charge_known(request, start, end, PREFILL_COST)

    def _grow(self, request: Request, builder: StepBuilder) -> tuple[int, ...]:
        """Allocate one more block for a decode; returns () when none is free and the request skips this step."""
        while self._pool.available == 0:
            builder.pressed = True
            if self._lingering:  # their blocks become free when their plans return
                return ()
            victim = choose_victim(self._running, self.ledger)
            assert victim is not None, "a request that asks for a block is not protected"
            self._preempt(victim)
            if victim is request:
                return ()
        request.blocks += (new_blocks := self._pool.allocate(1))
        return tuple(new_blocks)

    # -- admission -------------------------------------------------------------------------------------------

    def _admit_waiting(self, builder: StepBuilder) -> None:
        now = self._clock()
        while builder.open:
            head = self._queue.head(now)
            if head is None or not builder.fits(head):
                return  # it may fit into another step
            if not self.quarantine.admits(head):
                self._defer(head)
                continue
            hits = self._prefixes.match(head)
            n_fresh = fresh_blocks(self._pool, head, hits, len(self._running)) if self._slots.free else None
            worth, room = self.share_min_tokens, n_fresh is not None
            if self._prefixes.await_blocks(head, len(hits), worth, self._next_step, room=room):
                self._defer(head)
            elif n_fresh is not None:
                head.admitted_at = head.admitted_at or now
                self._admit(builder, head, hits, n_fresh)
            elif not self._make_way(head):
                return

    def _defer(self, head: Request) -> None:
        self._queue.take(head, Status.DEFERRED)
        self._deferred[head] = None

    def _wake(self, waiters: list[Request], *, patient: bool = True) -> None:
        for waiter in waiters:
            waiter.patient = patient
            del self._deferred[waiter]
            self._queue.push(waiter)

    def _admit(self, builder: StepBuilder, request: Request, hits: list[int], n_fresh: int) -> None:
        self._queue.take(request, Status.RUNNING)
        self._running[request] = None
        self._pool.share(hits)
        request.blocks, request.slot = hits + self._pool.allocate(n_fresh), self._slots.take()
        start = len(hits) * self.config.block_tokens
        request.begin(start, len(hits))
        self.counters.prefix_hit_tokens += start
        if request.n_preempted == 0:
            request.cached_tokens = min(start, request.n_prompt)
        self.ledger.charge_known(request, 0, start, CACHED_COST)
        self._prefixes.promise(request, len(hits))
        builder.admissions.append(request.admission(self._prefixes.restore(request, len(hits))))
        self._plan_chunk(builder, request)

    def _make_way(self, head: Request) -> bool:
        """Preempt a request less important than the waiting `head`; returns whether its blocks are free at once."""
        if self._lingering:  # blocks and slots become free already, when plans return
            return False
        lesser = [request for request in self._running if request.priority > head.priority]
        if (victim := choose_victim(lesser, self.ledger)) is None:
            return False
        self._preempt(victim)
        return not self._lingering

    # -- results ---------------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[tuple[Request, Output]]:
        """Take the result of the oldest plan in flight; returns the outputs of its requests."""
        planned = self.in_flight.popleft()
        assert planned.step == result.step, f"result of step {result.step}, but {planned.step} is the oldest in flight"
        results = {record.slot: record for record in result.slots}
        outputs: list[tuple[Request, Output]] = []
        done = Status.DONE
        for request, chunk in planned.work:
            request.n_in_flight -= 1
            record = results.get(chunk.slot) or SlotResult(chunk.slot)
            if request.status is done:
                self.counters.discarded_tokens += len(record.token_ids)
            elif (output := self._advance(request, chunk, record)) is not None:
                outputs.append((request, output))
        for request in planned.encoding:
            request.n_in_flight -= 1
        for request in [one for one in self._lingering if one.n_in_flight == 0]:
            self._let_go(request)
        self._prefixes.saved(planned.saves)
        self._events.flush()
        return outputs

    def _advance(self, request: Request, chunk: Chunk, record: SlotResult) -> Output | None:
        """Move a request on by the result of its chunk; returns its output, if the chunk drew."""
        output, size = request.advance(chunk, record), self.config.block_tokens
        if request.n_written // size > (first := chunk.start // size):
            self._wake(self._prefixes.publish(request, first))
        if output is None:
            return None
        if chunk.proposals:
            output = self.speculator.returned(request, output, self.ledger)
        self.counters.generated_tokens += (n_tokens := len(output.token_ids))
        self.ledger.charge(request.tenant, OUTPUT_COST * n_tokens)
        if output.finish is not None:
            self._end(request)
        return output

    # -- endings ---------------------------------------------------------------------------------------------

    def _preempt(self, victim: Request) -> None:
        victim.n_preempted += 1
        self.counters.preemptions += 1
        self._stop_running(victim, Status.RETIRING)

    def _end(self, request: Request) -> None:
        """End a request that is not in the queue."""
        self.ledger.leave(request.tenant)
        self.speculator.close(request)
        if request.status is Status.RUNNING:
            self._stop_running(request, Status.DONE)
        else:  # DEFERRED, or RETIRING, which frees its blocks when its last plan returns
            self._deferred.pop(request, None)
            request.status = Status.DONE

    def _stop_running(self, request: Request, status: Status) -> None:
        del self._running[request]
        request.status = status
        self._wake(self._prefixes.withdraw(request))
        if request.n_in_flight == 0:
            self._let_go(request)
        else:
            self._lingering[request] = None

    def _let_go(self, request: Request) -> None:
        """Free the blocks and the slot of a request without plans in flight; queue it again if it was preempted."""
        self._lingering.pop(request, None)
        self._pool.release(request.blocks)
        self._slots.give_back(request.slot)
        request.blocks, request.slot = [], -1
        if request.status is Status.RETIRING:
            request.restart()
            self._queue.push(request)

    def check(self) -> None:
        """Raise AssertionError when the pool, the slots and the requests disagree; for tests."""
        holders = [*self._running, *self._lingering]
        self._pool.check([*(request.blocks for request in holders), *self.transfers.tables()])
        held = [request.slot for request in holders]
        assert sorted([*held, *self._slots.free]) == list(range(self.config.max_running)), "slots lost or shared"
        for request in self._running:
            assert request.status is Status.RUNNING
            request.check(self.config.block_tokens, caches=self.config.caches)
        for request in self._lingering:
            assert request.n_in_flight > 0
            assert request.status in (Status.RETIRING, Status.DONE)
        assert all(request.status is Status.DEFERRED for request in self._deferred)
        assert len(self._queue) == sum(1 for _ in self._queue)
        assert self._queue.tokens == sum(len(request.token_ids) for request in self._queue)
