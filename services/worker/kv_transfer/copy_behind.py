"""Copies the KV of running requests to their standbys, behind the steps.

A copy is a call that lasts as long as its request. The first message names all blocks, and the answer says how many of
them the standby holds; each further one carries the next blocks. All copies of a worker share its bandwidth. When a
standby is lost, the next one of the request gets all blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import grpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.rpc import MAX_MESSAGE_BYTES, open_channel
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls
from services.worker.engine.errors import BlocksUnavailableError
from services.worker.engine.state import COPY_FAILURES, TransferTotals
from services.worker.kv_transfer.device import DeviceKv
from services.worker.kv_transfer.neighbour import REASONS
from services.worker.kv_transfer.source import BlockSource
from services.worker.scheduling.request import Request, Status

LAG_TOKENS = 128  # a message for every block would cost more than computing so many tokens
PERIOD_S = 0.25  # interval of looks for complete blocks
RETRY_S = 5.0  # after a standby without room, or the loss of all
LAST_S = 3.0  # longest time for the last blocks, in a drain
_BATCHES = 4  # messages per staging area: reading one delays the step after it by a millisecond or so

log = logging.getLogger(__name__)

_Call = grpc.aio.StreamStreamCall[pb.CopyBlocksRequest, pb.CopyBlocksResponse]


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Limits on copies at standbys."""

    tokens: int = 0  # shortest text; 0: none is copied
    bytes_per_s: float = 1.0  # highest rate of all copies of a worker


NO_COPIES = CopyLimits()


@dataclass(slots=True, eq=False)
class _Copy:
    request: Request
    standby: pb.Standby  # the present one
    device: DeviceKv
    n_named: int = 0  # blocks that the standby knows by name
    n_held: int = 0  # leading blocks that it holds
    room: int = 0  # blocks that it may take; 0 before its first answer
    lag: int = 0  # complete blocks that it does not hold


class CopyBehind:
    """All copies of one server to standbys. A copy that fails ends; its request never notices."""

    def __init__(
        self,
        device: Callable[[], DeviceKv | None],
        source: BlockSource,
        totals: TransferTotals,
        limits: CopyLimits,
        tls: Tls | None,
    ) -> None:
        self._device, self._source, self._totals = device, source, totals
        self._limits, self._tls = limits, tls
        self._turn = asyncio.Lock()  # one message at a time, at the rate of all copies
        self._finishing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, request: Request, standby: pb.Standby | None, device: DeviceKv) -> None:
        """Copy the request's complete blocks until it ends, if it has a standby."""
        if standby is not None and self._limits.tokens and device.shared and request.reads_cache:
            task = asyncio.create_task(self._run(_Copy(request, standby, device)), name="kv-copy")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Copy all complete blocks as fast as possible, for a limited time; copies end with it."""
        self._finishing.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)

    async def close(self) -> None:
        """Cancel all copies."""
        await end_tasks(self._tasks)

    async def _run(self, copy: _Copy) -> None:
        standbys = [copy.standby, *copy.standby.spares]
        try:
            while standbys:
                for standby in tuple(standbys):
                    reason = await self._copy_to(standby, copy)
                    if not reason:
                        return
                    if reason == "mismatch":
                        standbys.remove(standby)
                if self._finishing.is_set():
                    return
                await self._pause(RETRY_S)  # one that restarts comes back to its address
        except Exception as error:  # the request continues after any error
            log.exception("a copy failed")
            self._failed(copy, "error", repr(error))
        finally:
            self._set_lag(copy, 0)

    async def _copy_to(self, standby: pb.Standby, copy: _Copy) -> str:
        """Copy from the first block on until the request ends; returns why the standby is lost, or ""."""
        copy.standby, copy.n_named, copy.n_held, copy.room = standby, 0, 0, 0
        try:
            if await self._due(copy):
                async with open_channel(standby.address, to="worker", tls=self._tls) as channel:
                    await self._follow(copy, worker_pb2_grpc.WorkerStub(channel).CopyBlocks())
        except grpc.aio.AioRpcError as error:
            reason = REASONS.get(error.code(), "error")
            self._failed(copy, reason, f"{error.code().name}: {error.details()}")
            return reason
        return ""

    async def _follow(self, copy: _Copy, call: _Call) -> None:
        try:
            await call.wait_for_connection()  # not in a turn: copies to other standbys go on
            while await self._due(copy):
                async with self._turn:
                    progress = await self._send(copy, call)
                if not progress and self._finishing.is_set():
                    return
                if not progress:
                    await self._pause(RETRY_S)
        finally:
            call.cancel()

    async def _due(self, copy: _Copy) -> bool:
        """Wait until there is something to copy; False when the request has ended."""
        request, device = copy.request, copy.device
        while self._device() is device and request.status is not Status.DONE:
            finishing, size = self._finishing.is_set(), device.layout.block_tokens
            self._set_lag(copy, max(0, request.n_published - copy.n_held))
            long = len(request.token_ids) >= self._limits.tokens
            if long and copy.lag >= (1 if finishing else max(1, LAG_TOKENS // size)):
                return True
            if finishing:
                return False
            await self._pause(PERIOD_S)
        return False

    async def _send(self, copy: _Copy, call: _Call) -> bool:
        """Send the next blocks, or only names while there is no room; returns whether the next message can follow."""
        began, before = time.monotonic(), copy.n_held
        blocks = await self._read(copy) if copy.room else []
        if copy.room and not blocks:
            return False
        answer = await self._exchange(copy, call, blocks)
        copy.n_held, copy.room = answer.held, answer.room
        progress = answer.held > before or (answer.room > 0 and not blocks)
        if not progress:
            self._failed(copy, "full", "the standby has no room")
        n_bytes = sum(len(block.data) for block in blocks)
        await self._pause(n_bytes / self._limits.bytes_per_s - (time.monotonic() - began))
        return progress

    async def _exchange(self, copy: _Copy, call: _Call, blocks: list[pb.KvBlock]) -> pb.CopyBlocksResponse:
        request, layout = copy.request, copy.device.layout
        size, n = layout.block_tokens, request.n_published  # more are published while this waits
        named = range(copy.n_named, n)
        message = pb.CopyBlocksRequest(
            layout=layout,
            digests=request.block_digests(size, copy.n_named, n) if named else (),
            hashes=[value for index in named for value in request.block_hashes(size, index)],
            first=copy.n_held,
            blocks=blocks,
        )
        with suppress(grpc.aio.UsageError, asyncio.InvalidStateError):  # the call has ended; `read` says why
            await call.write(message)
        answer = await call.read()
        if not isinstance(answer, pb.CopyBlocksResponse):
            raise EOFError("the standby has ended the call")
        copy.n_named = max(copy.n_named, n)
        return answer

    async def _read(self, copy: _Copy) -> list[pb.KvBlock]:
        """The next blocks that the standby lacks; none while too many blocks are being read."""
        device, first = copy.device, copy.n_held
        most = max(1, min(device.blocks_per_copy // _BATCHES, MAX_MESSAGE_BYTES // 2 // device.block_bytes))
        end = min(copy.request.n_published, first + min(most, copy.room))
        digests = copy.request.block_digests(device.layout.block_tokens, 0, end)
        wanted = pb.PullBlocksRequest(digests=digests, first=first, layout=device.layout)
        try:
            async with aclosing(self._source.read(wanted)) as blocks:
                return [block async for block in blocks]
        except BlocksUnavailableError:
            return []

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until `finish`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._finishing.wait()

    def _set_lag(self, copy: _Copy, lag: int) -> None:
        self._totals.copy_lag_blocks += lag - copy.lag
        copy.lag = lag

    def _failed(self, copy: _Copy, reason: str, detail: str) -> None:
        self._totals.copy_failures[reason if reason in COPY_FAILURES else "error"] += 1
        log.info("KV blocks are not copied to %s now: %s, %s", copy.standby.worker_id, reason, detail)
