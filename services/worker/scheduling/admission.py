"""Admission: a sequence's length limit, the blocks an admission needs, and the order of the waiting queue."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from services.worker.engine.errors import TooLongError
from services.worker.scheduling.block_pool import BlockPool
from services.worker.scheduling.fairness import TenantLedger
from services.worker.scheduling.preemption import is_protected
from services.worker.scheduling.request import Request, Status


@dataclass(frozen=True, slots=True)
class Capacity:
    """The longest sequences that an empty pool can serve."""

    max_model_len: int
    kv_positions: int  # positions in the whole pool

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output; the last token's KV is never written."""
        return min(self.max_model_len, self.kv_positions + 1)

    def limit(self, request: Request) -> int:
        """Largest length of the sequence in tokens; raises TooLongError when the request cannot be served.

        A request without `max_tokens` gets all that fits, and a sequence ends at the end of the model's context.
        A `max_tokens` that can never fit the KV cache is refused here; the output is not cut short later.
        """
        if request.embed:
            most = min(self.max_model_len, self.kv_positions)
            if request.n_prompt > most:
                raise TooLongError("prompt_ids", f"{request.n_prompt} tokens; at most {most} fit this worker")
            return request.n_prompt + 1  # the embedding takes the place of the one drawn token
        most = self.max_request_tokens
        if len(request.token_ids) >= most:
            what = "prompt_ids" if request.n_prompt >= most else "generated_ids"
            message = f"{len(request.token_ids)} tokens leave no room for output; at most {most - 1} fit this worker"
            raise TooLongError(what, message)
        if request.max_tokens == 0:
            return most
        wanted = min(request.n_prompt + request.max_tokens, self.max_model_len)
        if wanted > most:
            message = (
                f"{request.n_prompt} prompt tokens and max_tokens {request.max_tokens} need {wanted} tokens of KV "
                f"cache; at most {most - request.n_prompt} output tokens fit this worker"
            )
            raise TooLongError("sampling.max_tokens", message)
        return wanted


@dataclass(slots=True)
class _Queue:
    """Waiting requests of one tenant and priority, by arrival; `head` drops cancelled requests."""

    heap: list[tuple[int, Request]]

    def head(self) -> Request | None:
        while self.heap:
            request = self.heap[0][1]
            if request.status is Status.WAITING:
                return request
            heapq.heappop(self.heap)
        return None


def fresh_blocks(pool: BlockPool, request: Request, hits: list[int], n_running: int) -> int | None:
    """Number of blocks to allocate, besides the cached `hits`, to admit the request now; None when too few are free.

    An admission allocates the blocks of all known tokens; a protected request gets the blocks of its whole limit.
    One block per running request stays in reserve, so that an admission causes no preemption in the next steps.
    A pool without blocks caches nothing, and admissions need none.
    """
    if not pool.total:
        return 0
    n_tokens = request.limit - 1 if is_protected(request) else len(request.token_ids)
    n_fresh = -(-n_tokens // pool.block_tokens) - len(hits)
    free = pool.available - pool.idle(hits)
    reserve = min(n_running, pool.total // 8)
    return n_fresh if n_fresh + reserve <= free else None


class WaitingQueue:
    """Orders requests by aged priority, then by their tenant's service so far, then by arrival."""

    def __init__(self, ledger: TenantLedger, age_s: float) -> None:
        self._ledger = ledger
        self._age_s = age_s  # seconds of waiting that are worth one level of priority
        self._queues: dict[tuple[int, str], _Queue] = {}
        self._size = 0
        self._tokens = 0

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return self._tokens

    def push(self, request: Request) -> None:
        """Queue a request; a request that waited before gets its old place."""
        request.status = Status.WAITING
        queue = self._queues.setdefault((request.priority, request.tenant), _Queue([]))
        heapq.heappush(queue.heap, (request.arrival, request))
        self._size += 1
        self._tokens += len(request.token_ids)

    def take(self, request: Request, status: Status) -> None:
        """Remove a waiting request by giving it another status; only the head may be pushed again later."""
        request.status = status
        heap = self._queues[request.priority, request.tenant].heap
        if heap[0][1] is request:
            heapq.heappop(heap)
        self._size -= 1
        self._tokens -= len(request.token_ids)

    def head(self, now: float) -> Request | None:
        """The request to admit next; None when the queue is empty."""
        best: Request | None = None
        best_key: tuple[int, float, int] | None = None
        empty = []
        for key, queue in self._queues.items():
            request = queue.head()
            if request is None:
                empty.append(key)
                continue
            rank = self._rank(request, now)
            if best_key is None or rank < best_key:
                best, best_key = request, rank
        for key in empty:
            del self._queues[key]
        return best

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from (request for _, request in queue.heap if request.status is Status.WAITING)

    def _rank(self, request: Request, now: float) -> tuple[int, float, int]:
        aged = request.priority - int((now - request.queued_at) / self._age_s)
        return aged, self._ledger.served(request.tenant), request.arrival
