"""Fetches the KV of a prompt's first tokens from another worker instead of computing it.

A pull may fail: the request is then queued with the blocks that arrived, and the rest is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.rpc import open_channel
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.store import KvStore
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.request import Request, Status
from services.worker.scheduling.transfers import Arrival

MAX_PULLS = 4  # at one time; each holds at most the bytes of one staging area, besides gRPC's window
# A pull may take PATIENCE times as long as computing the blocks, and at least LEAST_S: the source may be in a step.
PATIENCE, LEAST_S, MOST_S = 2.0, 1.0, 10.0
REMEMBER_S = 60.0  # an older measurement of the bandwidth does not count
_WEIGHT = 0.3  # weight of the newest pull in the moving average

log = logging.getLogger(__name__)

_REASONS = {
    grpc.StatusCode.FAILED_PRECONDITION: "mismatch",
    grpc.StatusCode.NOT_FOUND: "gone",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
}


class _FailedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _UnwantedError(Exception):
    """No request waits for the blocks any more."""


@dataclass(slots=True, eq=False)
class _Pull:
    hint: pb.PullHint
    prefix: list[bytes]  # digests of all blocks, including those that this worker holds
    arrival: Arrival
    waiting: list[Request]
    n_received: int = 0  # blocks

    @property
    def wanted(self) -> bool:
        return any(request.status is Status.DEFERRED for request in self.waiting)


class Puller:
    """All pulls of one server. Each queues its deferred requests again at its end, after success and failure."""

    def __init__(self, assumed_bytes_per_s: float, totals: TransferTotals, tls: Tls | None = None) -> None:
        """`bytes_per_s` returns `assumed_bytes_per_s` before a measurement; 0 means: do not pull."""
        self._assumed_bytes_per_s = assumed_bytes_per_s
        self._pulls: dict[_Pull, asyncio.Task[None]] = {}
        self._bytes_per_s = 0.0
        self._measured_at = -REMEMBER_S
        self._totals = totals
        self._tls = tls

    def bytes_per_s(self, now: float) -> float:
        """Recent bandwidth from the source to the ranks; the assumed one without a recent measurement."""
        return self._bytes_per_s if now - self._measured_at < REMEMBER_S else self._assumed_bytes_per_s

    def start(self, store: KvStore, request: Request, hint: pb.PullHint, prefill_tokens_per_s: float) -> None:
        """Fetch the missing blocks of the first `hint.tokens` tokens of a deferred request."""
        transfers, size = store.owner.scheduler.transfers, store.layout.block_tokens
        prefix = request.block_digests(size, 0, min(hint.tokens, len(request.token_ids) - 1) // size)
        for pull in self._pulls:
            if prefix and prefix[-1] in pull.arrival.digests:
                pull.waiting.append(request)
                return
        arrival = None
        if store.blocks_per_copy and len(self._pulls) < MAX_PULLS:
            arrival = transfers.expect(request, hint.tokens)
        if arrival is None:  # no block is missing, or there is no room
            store.owner.requeue([request])
            return
        pull = _Pull(hint, prefix, arrival, [request])
        limit_s = MOST_S
        if prefill_tokens_per_s:
            computing_s = len(arrival.digests) * size / prefill_tokens_per_s
            limit_s = min(limit_s, max(LEAST_S, PATIENCE * computing_s))
        self._pulls[pull] = asyncio.create_task(self._run(store, pull, limit_s), name="pull")

    def blocks_received(self, request: Request) -> int | None:
        """Number of blocks that have arrived for a request; None if it waits for none."""
        return next((pull.n_received for pull in self._pulls if request in pull.waiting), None)

    async def close(self) -> None:
        """Cancel all pulls."""
        await end_tasks(self._pulls.values())

    async def _run(self, store: KvStore, pull: _Pull, limit_s: float) -> None:
        began, n_missing = time.monotonic(), len(pull.arrival.digests)
        try:
            async with asyncio.timeout(limit_s):
                await self._fetch(store, pull, limit_s)
        except TimeoutError:
            self._failed(pull, "timeout", f"not complete after {limit_s:.1f} s")
        except _FailedError as error:
            self._failed(pull, error.reason, str(error))
        except RanksFailedError as error:
            self._failed(pull, "ranks_lost", str(error))
        except grpc.aio.AioRpcError as error:
            self._failed(pull, _REASONS.get(error.code(), "error"), f"{error.code().name}: {error.details()}")
        except _UnwantedError:
            log.debug("a pull is not wanted any more")
        except Exception:  # the requests continue after any error
            log.exception("a pull failed")
            self._totals.pull_failures["error"] += 1
        finally:
            del self._pulls[pull]
            seconds, n = time.monotonic() - began, n_missing - len(pull.arrival.digests)
            self._totals.pulled_seconds += seconds
            if n:
                self._measure(n * store.block_bytes / seconds)
            store.owner.finish(pull.arrival)
            store.owner.requeue(pull.waiting)

    async def _fetch(self, store: KvStore, pull: _Pull, limit_s: float) -> None:
        """Receive the blocks in order; write and publish them in batches of one staging area."""
        arrival, most = pull.arrival, store.blocks_per_copy
        request = pb.PullBlocksRequest(
            digests=pull.prefix, first=len(arrival.held), incarnation=pull.hint.incarnation, layout=store.layout
        )
        batch: list[bytes] = []
        async with open_channel(pull.hint.address, to="worker", tls=self._tls) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).PullBlocks(request, timeout=limit_s)
            try:
                async for block in call:
                    batch.append(_checked(block, arrival.digests[len(batch)], store.block_bytes))
                    pull.n_received += 1
                    if len(batch) == min(most, len(arrival.digests)):
                        await self._adopt(store, pull, batch)
                        batch = []
                        if not arrival.digests:
                            return
            finally:
                call.cancel()
        if batch:
            await self._adopt(store, pull, batch)
        raise _FailedError("evicted", f"{len(arrival.digests)} of {len(pull.prefix)} blocks are not held there")

    async def _adopt(self, store: KvStore, pull: _Pull, batch: Sequence[bytes]) -> None:
        if not pull.wanted:
            raise _UnwantedError
        await store.ranks.write_blocks(pull.arrival.fresh[: len(batch)], batch)
        store.owner.adopt(pull.arrival, len(batch))
        self._totals.pulled_blocks += len(batch)
        self._totals.pulled_bytes += sum(len(data) for data in batch)

    def _failed(self, pull: _Pull, reason: str, detail: str) -> None:
        self._totals.pull_failures[reason] += 1
        log.warning(
            "KV blocks of %s could not be pulled, %d are computed instead: %s, %s",
            pull.hint.worker_id, len(pull.arrival.digests), reason, detail,
        )  # fmt: skip

    def _measure(self, bytes_per_s: float) -> None:
        now = time.monotonic()
        fresh = now - self._measured_at >= REMEMBER_S
        self._bytes_per_s = bytes_per_s if fresh else self._bytes_per_s + _WEIGHT * (bytes_per_s - self._bytes_per_s)
        self._measured_at = now


def _checked(block: pb.KvBlock, digest: bytes, n_bytes: int) -> bytes:
    """The block's bytes after validating digest, size and CRC; raises _FailedError."""
    if block.digest != digest:
        raise _FailedError("corrupt", "another block came than was due")
    if len(block.data) != n_bytes:
        raise _FailedError("corrupt", f"a block of {len(block.data)} bytes came where {n_bytes} are one")
    if zlib.crc32(block.data) != block.crc32:
        raise _FailedError("corrupt", "a block came with a wrong checksum")
    data: bytes = block.data
    return data
