"""Workers in virtual time: our scheduler with the worker's measurements and trade-offs; a step's time is a curve's."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2

from services.common.blockhash import HASH_BLOCK_TOKENS
from services.planner.cores import SharedCores
from services.planner.tiers import TierKind, VirtualTier
from services.planner.trace import TraceRequest
from services.worker.engine.kv_events import KvEventLog
from services.worker.native.step_cost import LEAST_PROMPT_S, StepTimer
from services.worker.protocol.plan import SlotResult, StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.places import DEVICE_ONLY
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.step_builder import StepLoad, prompt_tokens
from services.worker.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_KV_TOKENS
from services.worker.simulated.curve import StepCurve

_PROBE_ROWS = (16, 64, 256)  # prompts by which a worker measures itself at its start
_HEARTBEAT_MS = 1 << 31  # virtual workers report changes only, and are never silent
ROUTER_ID = "planner"
_ANSWER = 1  # token of answers, whose texts matter to no decision
_ROUNDING_S = 1e-9  # error of a step's end after changes of the cores' division


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A machine with a model on it."""

    curve: StepCurve
    max_running: int = 64
    prefill_step_s: float = 0.2
    block_tokens: int = HASH_BLOCK_TOKENS
    shared_cores: int = 0  # cores that all workers of one thread share; 0: each worker has its own
    tier: TierKind | None = None  # below the KV cache

    def scheduler_config(self) -> SchedulerConfig:
        """The configuration of its scheduler."""
        kv_tokens = self.curve.kv_tokens or DEFAULT_KV_TOKENS
        return SchedulerConfig(
            n_blocks=kv_tokens // self.block_tokens,
            block_tokens=self.block_tokens,
            max_model_len=kv_tokens,
            max_running=self.max_running,
            max_batched_tokens=DEFAULT_BATCHED_TOKENS[self.curve.device],
        )


def request_of(source: TraceRequest, number: int) -> Request:
    """A request whose tokens repeat those of another one exactly as far as their hashes are equal."""
    tokens = array("I")
    for block in source.blocks[: source.prompt_tokens // source.block_tokens]:
        for part in range(source.block_tokens // HASH_BLOCK_TOKENS):
            tokens.extend((block & 0xFFFFFFFF, block >> 32, part, *(0,) * (HASH_BLOCK_TOKENS - 3)))
    own = source.prompt_tokens - len(tokens)
    tokens.extend((number & 0xFFFFFFFF,) * own)
    return Request(
        list(tokens),
        source.prompt_tokens,
        worker_pb2.Sampling(max_tokens=source.answer_tokens),
        max_tokens=source.answer_tokens,
        tenant=source.tenant,
        chain_root=source.tenant.encode(),
    )


@dataclass(slots=True)
class RequestTimes:
    """When tokens of a request were there."""

    source: TraceRequest
    first_at: float = -1.0  # < 0: not yet
    done_at: float = -1.0


class ReplayWorker:
    """One worker. `advance` and `deliver` are called when their times have come; `wake_at` says when that is next."""

    def __init__(
        self, worker_id: str, kind: WorkerKind, clock: Callable[[], float], cores: SharedCores | None = None
    ) -> None:
        """`cores` are those that it shares with other workers; None: it has its own."""
        self.worker_id, self._kind, self._clock, self._cores = worker_id, kind, clock, cores or SharedCores()
        self.timer = StepTimer(LEAST_PROMPT_S[kind.curve.device])
        self.tier = VirtualTier(kind.tier, kind.block_tokens, self.timer, clock) if kind.tier else None
        places = self.tier or DEVICE_ONLY
        self.scheduler = Scheduler(kind.scheduler_config(), KvEventLog(1), clock=clock, places=places)
        if self.tier is not None:
            self.tier.attach(self.scheduler)
        self.progress: dict[Request, RequestTimes] = {}
        self.busy_s = 0.0
        self.acked = 0  # number of the last dispatch
        self._due: deque[tuple[float, StepPlan]] = deque()  # steps by their ends, on the clock of work
        self._free_at = 0.0  # end of the last step, on the clock of work
        self._last_result = 0.0
        self._plan_at = -1.0  # < 0: no plan is put off
        self._probe()
        self._probed_tokens = self.timer.computed_tokens

    def _probe(self) -> None:
        """Measure a decode and prompts, as a worker does when it starts."""
        curve = self._kind.curve
        self.timer.returned(StepLoad(1), curve.seconds(1, 0.0, 0, 0.0))
        for rows in _PROBE_ROWS:
            load = StepLoad(rows, rows, rows * rows / 2)
            self.timer.returned(load, curve.seconds(0, 0.0, rows, load.n_keys))
        self._adapt()

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts and answers that it has computed for requests."""
        return self.timer.computed_tokens - self._probed_tokens

    @property
    def computes(self) -> bool:
        """Whether a step is being computed."""
        return bool(self._due)

    @property
    def wake_at(self) -> float | None:
        """When something happens next without a new request; None: never."""
        step = self._cores.at(self._due[0][0]) if self._due else None
        plan = self._plan_at if self._plan_at >= 0 else None
        loaded = self.tier.due if self.tier else None
        return min((at for at in (step, plan, loaded) if at is not None), default=None)

    def submit(self, request: Request, source: TraceRequest) -> None:
        """Take a request. Raises TooLongError."""
        self.scheduler.submit(request)
        self.progress[request] = RequestTimes(source)
        if self._plan_at < 0:  # else the plan that is due soon includes it
            self._advance()

    def wake(self) -> list[RequestTimes]:
        """Do what is due now; returns the requests that have ended."""
        ended = []
        while self._due and self._due[0][0] <= self._cores.work(self._clock()) + _ROUNDING_S:
            ended += self._deliver()
        if self.tier is not None and self.tier.due is not None and self.tier.due <= self._clock():
            self.tier.end_loads()
            if self._plan_at < 0:  # as in submit
                self._advance()
        if 0 <= self._plan_at <= self._clock():
            self._plan_at = -1.0
            self._plan()
        return ended

    def _deliver(self) -> list[RequestTimes]:
        now, (_, plan) = self._clock(), self._due.popleft()
        step = self.scheduler.in_flight[0]
        drawn = tuple(SlotResult(chunk.slot, (_ANSWER,)) for chunk in plan.chunks if chunk.draws)
        outputs = self.scheduler.apply(StepResult(plan.step, drawn))
        seconds = now - max(step.planned_at, self._last_result)
        self.timer.returned(step.load, seconds)
        self.busy_s += seconds
        self._last_result = now
        self._adapt()
        ended = []
        for request, output in outputs:
            progress = self.progress[request]
            progress.first_at = now if progress.first_at < 0 else progress.first_at
            if output.finish is not None:
                progress.done_at = now
                ended.append(self.progress.pop(request))
        self._plan_at = -1.0
        self._advance()
        return ended

    def _adapt(self) -> None:
        scheduler, timer = self.scheduler, self.timer
        scheduler.share_min_tokens = timer.share_min_tokens(scheduler.config.block_tokens)
        measured = timer.prefill_budget(self._kind.prefill_step_s, scheduler.n_running)
        scheduler.prefill_budget = measured or scheduler.prefill_budget

    def _advance(self) -> None:
        """Keep the ranks supplied, but plan as late as possible, as the worker's pump does."""
        in_flight = self.scheduler.in_flight
        while len(in_flight) < self.scheduler.config.max_in_flight:
            if in_flight:
                step = in_flight[0]
                spare = self.timer.spare_s(step.load)
                at = max(step.planned_at, self._last_result) + spare
                if spare and at > self._clock():
                    self._plan_at = at
                    return
            if not self._plan():
                return

    def _plan(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        load = StepLoad.of(plan.chunks)
        decode_keys = float(sum(chunk.start for chunk in plan.chunks if chunk.n_tokens == 1))
        n_decodes = load.n_rows - load.n_prefill_rows
        seconds = self._kind.curve.seconds(n_decodes, decode_keys, load.n_prefill_rows, load.n_keys)
        self._free_at = max(self._free_at, self._cores.work(self._clock())) + seconds
        self._due.append((self._free_at, plan))
        return True

    def matched_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that are cached here."""
        return len(self.scheduler.pool.match(self._prompt_digests(request))) * self._kind.block_tokens

    def offloaded_tokens(self, request: Request) -> tuple[int, float]:
        """Tokens of the request's prompt that would be loaded from the tier, and the milliseconds of the load."""
        if self.tier is None:
            return 0, 0.0
        digests = self._prompt_digests(request)
        n_tokens = self.tier.loadable(digests, len(self.scheduler.pool.match(digests)))
        return n_tokens, 1e3 * self.tier.load_s(n_tokens)

    def _prompt_digests(self, request: Request) -> list[bytes]:
        size = self._kind.block_tokens
        return request.block_digests(size, 0, request.n_prompt // size)

    def state(self) -> worker_pb2.WorkerState:
        """The worker's state as routers get it."""
        scheduler, timer = self.scheduler, self.timer
        return worker_pb2.WorkerState(
            worker_id=self.worker_id,
            incarnation="virtual",
            phase=worker_pb2.PHASE_SERVING,
            queued_prefill_tokens=scheduler.queued_prefill_tokens + prompt_tokens(scheduler.in_flight),
            running=scheduler.n_running,
            waiting=scheduler.n_waiting,
            prefill_tokens_per_s=timer.prefill_tokens_per_s,
            decode_step_ms=timer.decode_step_ms,
            computed_tokens=timer.computed_tokens,
            max_request_tokens=scheduler.capacity.max_request_tokens,
            heartbeat_ms=_HEARTBEAT_MS,
            acked={ROUTER_ID: self.acked},
        )
