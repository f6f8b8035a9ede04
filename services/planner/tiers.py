"""A tier below a virtual worker's KV cache, such as host memory or a disk, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.native.step_cost import StepTimer
from services.worker.scheduling.places import BlockName
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival


@dataclass(frozen=True, slots=True)
class TierKind:
    """The size and the speed of a tier of one worker."""

    tokens: int  # its size in KV of tokens
    tokens_per_s: float  # that it loads


@dataclass(frozen=True, slots=True)
class _Load:
    ends_at: float
    arrival: Arrival
    waiting: list[Request]


class VirtualTier:
    """Implements `Places`, with the choices of a worker's tiers. Copies to it take no time; loads share its speed."""

    def __init__(self, kind: TierKind, block_tokens: int, timer: StepTimer, clock: Callable[[], float]) -> None:
        self._kind, self._block_tokens, self._timer, self._clock = kind, block_tokens, timer, clock
        self._blocks: dict[bytes, None] = {}  # insertion order: the next to evict comes first
        self._loads: deque[_Load] = deque()  # by their ends
        self._postponed: list[Request] = []
        self._scheduler: Scheduler | None = None

    def attach(self, scheduler: Scheduler) -> None:
        """Load blocks into this scheduler's pool."""
        self._scheduler = scheduler

    @property
    def due(self) -> float | None:
        """When the next load ends; None: there is none."""
        return self._loads[0].ends_at if self._loads else None

    def end_loads(self) -> None:
        """End the loads that are due: their requests continue with the blocks."""
        assert self._scheduler is not None
        while self._loads and self._loads[0].ends_at <= self._clock():
            load = self._loads.popleft()
            self._scheduler.adopt(load.arrival, len(load.arrival.digests))
            self._scheduler.transfers.finish(load.arrival)
            for request in self._postponed:
                request.looked_up = None
            for request in (*load.waiting, *self._postponed):
                self._scheduler.requeue(request)
            self._postponed.clear()

    def loadable(self, digests: Sequence[bytes], first: int) -> int:
        """Tokens of the blocks after the `first` ones that load faster than they are computed."""
        end = first
        while end < len(digests) and digests[end] in self._blocks:
            end += 1
        n_tokens = (end - first) * self._block_tokens
        computed_s = n_tokens / self._timer.prefill_tokens_per_s if self._timer.prefill_tokens_per_s else float("inf")
        return n_tokens if self.load_s(n_tokens) <= computed_s else 0

    def load_s(self, n_tokens: float) -> float:
        """Seconds that a load takes by itself."""
        return n_tokens / self._kind.tokens_per_s

    # -- Places ------------------------------------------------------------------------------------------------

    def published(self, block: BlockName) -> None:
        """Keep a copy; the least recently used one goes."""
        self._touch(block.digest)
        while len(self._blocks) * self._block_tokens > self._kind.tokens:
            del self._blocks[next(iter(self._blocks))]

    def evicted(self, digest: bytes) -> None:
        """Its copy stays."""

    def saved(self, digest: bytes) -> None:
        """Ignore it: a virtual model has no states."""

    def cleared(self) -> None:
        """Copies stay."""

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        """Begin to load blocks after the `first` ones, if that is quicker than computing and saves `worth_tokens`."""
        assert self._scheduler is not None
        for digest in reversed(digests):  # the first of a prefix stay longest: the others are of no use without them
            if digest in self._blocks:
                self._touch(digest)
        n_tokens = self.loadable(digests, first)
        if n_tokens < max(1, worth_tokens):
            return False
        n_blocks = first + n_tokens // self._block_tokens
        for load in self._loads:
            if digests[n_blocks - 1] in load.arrival.digests:
                load.waiting.append(request)
                return True
        arrival = self._scheduler.transfers.expect(request, n_blocks * self._block_tokens)
        if arrival is None:
            if self._loads:  # the end of one makes room
                self._postponed.append(request)
            return bool(self._loads)
        began = self._loads[-1].ends_at if self._loads else self._clock()
        self._loads.append(_Load(began + self.load_s(n_tokens), arrival, [request]))
        return True

    def _touch(self, digest: bytes) -> None:
        self._blocks.pop(digest, None)
        self._blocks[digest] = None
