"""Brings the KV of a prompt's first tokens into the pool from another place instead of computing it.

A load may fail: the request is then queued with the blocks that arrived, and the rest is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from services.common.tasks import end_tasks
from services.worker.kv_transfer.device import DeviceKv
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.request import Request, Status
from services.worker.scheduling.transfers import Arrival

MAX_LOADS = 4  # at one time; each holds at most the bytes of one staging area, besides gRPC's window
# A load may take PATIENCE times as long as computing the blocks, and at least LEAST_S: the source may be in a step.
PATIENCE, LEAST_S, MOST_S = 2.0, 1.0, 10.0
REMEMBER_S = 60.0  # an older measurement of the bandwidth does not count
_WEIGHT = 0.3  # weight of the newest load in the moving average

log = logging.getLogger(__name__)


class LoadError(Exception):
    """No further block comes; `reason` is a label of metrics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _UnwantedError(Exception):
    """No request waits for the blocks any more."""


class PrefixReader(Protocol):
    """One load's blocks in the place they come from, with the pieces of the state at their end if it is loaded too."""

    def read(self, digests: Sequence[bytes], first: int, limit_s: float) -> AsyncGenerator[bytes, None]:
        """The checked contents of the prefix `digests` from block `first` on, in order. Raises LoadError."""

    def loaded(self, n_blocks: int, n_bytes: int) -> None:
        """Called for blocks that are in the pool now."""

    def failed(self, reason: str, detail: str, n_missing: int) -> None:
        """Called when `n_missing` blocks do not come."""

    def ended(self, n_bytes: int, seconds: float) -> None:
        """Called at the end of the load, which brought `n_bytes`."""


class Bandwidth:
    """The speed of loads from one place, until the blocks are in the pool."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self._assumed = assumed_bytes_per_s
        self._bytes = self._seconds = 0.0  # moving averages of loads
        self._measured_at = -REMEMBER_S

    def bytes_per_s(self) -> float:
        """Recent bandwidth; the assumed one without a recent measurement."""
        recent = time.monotonic() - self._measured_at < REMEMBER_S
        return self._bytes / self._seconds if recent else self._assumed

    def measure(self, n_bytes: int, seconds: float) -> None:
        """Learn from a load."""
        now, seconds = time.monotonic(), max(seconds, 1e-6)
        weight = _WEIGHT if now - self._measured_at < REMEMBER_S else 1.0
        self._bytes += weight * (n_bytes - self._bytes)
        self._seconds += weight * (seconds - self._seconds)
        self._measured_at = now


@dataclass(slots=True, eq=False)
class _Load:
    reader: PrefixReader
    prefix: list[bytes]  # digests of all blocks, including those that the pool holds
    arrival: Arrival
    waiting: list[Request]
    pieces: list[bytes]  # digests of the pieces of the state after the prefix; none: it is not loaded
    n_received: int = 0  # blocks and pieces

    @property
    def wanted(self) -> bool:
        return any(request.status is Status.DEFERRED for request in self.waiting)

    @property
    def n_missing(self) -> int:
        return len(self.arrival.digests) + len(self.pieces)

    def brings_state(self, prefix: Sequence[bytes]) -> bool:
        return bool(self.pieces) and self.prefix[-1] == prefix[-1]


class BlockLoader:
    """All loads of one server. Each queues its deferred requests again at its end, after success and failure."""

    def __init__(self, prefill_tokens_per_s: Callable[[], float]) -> None:
        """`prefill_tokens_per_s`: the speed of computing; 0: unknown."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._loads: dict[_Load, asyncio.Task[None]] = {}
        self._postponed: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether a load is in progress."""
        return bool(self._loads)

    def start(
        self, device: DeviceKv, request: Request, reader: PrefixReader, n_tokens: int, *, with_state: bool = False
    ) -> bool:
        """Bring the missing blocks of the first `n_tokens` tokens; the caller defers the request after True.

        `with_state`: and the state after them, also when no block is missing. False: nothing is missing, or there is
        no room.
        """
        size = device.layout.block_tokens
        prefix = request.block_digests(size, 0, min(n_tokens, len(request.token_ids) - 1) // size)
        for load in self._loads:
            if prefix and (prefix[-1] in load.arrival.digests or (with_state and load.brings_state(prefix))):
                load.waiting.append(request)
                return True
        arrival = None
        if device.blocks_per_copy and len(self._loads) < MAX_LOADS:
            least = 0 if with_state else 1
            arrival = device.owner.scheduler.transfers.expect(request, n_tokens, least=least)
        if arrival is None:
            return False
        pieces = [name.digest for name in device.pieces(prefix[-1])] if with_state else []
        load = _Load(reader, prefix, arrival, [request], pieces)
        limit_s, n_blocks = MOST_S, len(prefix) if with_state else len(arrival.digests)
        if tokens_per_s := self.prefill_tokens_per_s():
            limit_s = min(limit_s, max(LEAST_S, PATIENCE * n_blocks * size / tokens_per_s))
        self._loads[load] = asyncio.create_task(self._run(device, load, limit_s), name="load")
        return True

    def postpone(self, request: Request) -> None:
        """Queue a deferred request again when a load ends, and look its blocks up once more."""
        self._postponed.append(request)

    def blocks_received(self, request: Request) -> int | None:
        """Number of blocks that have arrived for a request; None if it waits for none."""
        return next((load.n_received for load in self._loads if request in load.waiting), None)

    async def close(self) -> None:
        """Cancel all loads."""
        await end_tasks(self._loads.values())

    async def _run(self, device: DeviceKv, load: _Load, limit_s: float) -> None:
        began, reader, arrival = time.monotonic(), load.reader, load.arrival
        n_missing = len(arrival.digests)
        try:
            async with asyncio.timeout(limit_s):
                await self._fetch(device, load, limit_s)
        except TimeoutError:
            reader.failed("timeout", f"not complete after {limit_s:.1f} s", load.n_missing)
        except LoadError as error:
            reader.failed(error.reason, str(error), load.n_missing)
        except RanksFailedError as error:
            reader.failed("ranks_lost", str(error), load.n_missing)
        except _UnwantedError:
            log.debug("a load is not wanted any more")
        except Exception as error:  # the requests continue after any error
            log.exception("a load failed")
            reader.failed("error", repr(error), load.n_missing)
        finally:
            del self._loads[load]
            reader.ended((n_missing - len(arrival.digests)) * device.block_bytes, time.monotonic() - began)
            device.owner.finish(arrival)
            for request in self._postponed:
                request.looked_up = None
            device.owner.requeue([*load.waiting, *self._postponed])
            self._postponed.clear()

    async def _fetch(self, device: DeviceKv, load: _Load, limit_s: float) -> None:
        """Receive the blocks in order; write and publish them in batches of one staging area, then the state."""
        arrival, most = load.arrival, device.blocks_per_copy
        batch: list[bytes] = []
        async with aclosing(load.reader.read([*load.prefix, *load.pieces], len(arrival.held), limit_s)) as blocks:
            async for content in blocks:
                batch.append(content)
                load.n_received += 1
                if arrival.digests and len(batch) == min(most, len(arrival.digests)):
                    await self._adopt(device, load, batch)
                    batch = []
                if not arrival.digests and len(batch) == len(load.pieces):
                    await self._take_state(device, load, batch)
                    return
        if batch and arrival.digests:
            await self._adopt(device, load, batch)
        missing = f"{len(arrival.digests)} of {len(load.prefix)} blocks"
        raise LoadError("evicted", f"{missing if arrival.digests else 'pieces of a state'} are not held there")

    async def _adopt(self, device: DeviceKv, load: _Load, batch: Sequence[bytes]) -> None:
        if not load.wanted:
            raise _UnwantedError
        await device.ranks.write_blocks(load.arrival.fresh[: len(batch)], batch)
        device.owner.adopt(load.arrival, len(batch))
        load.reader.loaded(len(batch), sum(len(content) for content in batch))

    async def _take_state(self, device: DeviceKv, load: _Load, pieces: Sequence[bytes]) -> None:
        """Make a snapshot of a state, if one was loaded and the ranks have none."""
        if not pieces:
            return
        if not load.wanted:
            raise _UnwantedError
        snapshots, digest, written = device.owner.scheduler.transfers.snapshots, load.prefix[-1], False
        assert snapshots is not None, "states are loaded for models that have them"
        row = snapshots.expect(digest)
        if row is None:
            return
        try:
            await device.write_state(row, pieces)
            written = True
        finally:
            snapshots.arrived(digest, row, written=written)
