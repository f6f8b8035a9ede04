"""Takes copies of the running requests of other workers into the prefix cache, for the case that these are lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.errors import BlocksUnavailableError, Unavailable
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.device import DeviceKv, mismatch
from services.worker.kv_transfer.loader import LoadError
from services.worker.kv_transfer.neighbour import checked
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.transfers import MAX_SHARE


@dataclass(slots=True, eq=False)
class _Copied:
    """The blocks of one call."""

    digests: list[bytes] = field(default_factory=list)
    hashes: list[tuple[int, ...]] = field(default_factory=list)  # wire hashes of each
    n_written: int = 0


class Standby:
    """Holds copies in the prefix cache, where they are evicted like all cached blocks.

    Copies of running requests take at most MAX_SHARE of the pool, so the rest of the prefix cache stays.
    """

    def __init__(self, device: Callable[[], DeviceKv | None], totals: TransferTotals) -> None:
        self._device, self._totals = device, totals
        self._calls: set[_Copied] = set()

    async def take(self, messages: AsyncIterator[pb.CopyBlocksRequest]) -> AsyncGenerator[pb.CopyBlocksResponse, None]:
        """Answer each message of a call by what is held of its blocks. Raises BlocksUnavailableError."""
        copied = _Copied()
        self._calls.add(copied)
        try:
            async for message in messages:
                device = self._admit(message)
                self._name(copied, message)
                if message.blocks:
                    await self._write(device, copied, message.first, message.blocks)
                held = len(device.owner.scheduler.pool.match(copied.digests))
                yield pb.CopyBlocksResponse(held=held, room=self._room(device))
        finally:
            self._calls.discard(copied)

    def _room(self, device: DeviceKv) -> int:
        """Number of blocks that copies of running requests may add."""
        most = int(device.owner.scheduler.pool.total * MAX_SHARE)
        return max(0, most - sum(copied.n_written for copied in self._calls))

    def _admit(self, message: pb.CopyBlocksRequest) -> DeviceKv:
        device = self._device()
        if device is None:
            raise BlocksUnavailableError(Unavailable.GONE, "no ranks serve here now")
        reason = mismatch(message.layout, device.layout)
        if reason or not device.shared:
            raise BlocksUnavailableError(Unavailable.MISMATCH, reason or "blocks of this model are not moved")
        return device

    @staticmethod
    def _name(copied: _Copied, message: pb.CopyBlocksRequest) -> None:
        n, n_hashes = len(message.digests), len(message.hashes)
        per_block = n_hashes // n if n else 0
        if n and not n_hashes == n * per_block > 0:
            reason = f"{n_hashes} hashes are not the same number for each of {n} blocks"
            raise BlocksUnavailableError(Unavailable.MISMATCH, reason)
        copied.digests += message.digests
        copied.hashes += [tuple(message.hashes[i * per_block : (i + 1) * per_block]) for i in range(n)]

    async def _write(self, device: DeviceKv, copied: _Copied, first: int, blocks: Sequence[pb.KvBlock]) -> None:
        """Write those of the call's `blocks`, from `first` on, that follow the ones here, if there is room."""
        scheduler, end = device.owner.scheduler, first + len(blocks)
        n_held = len(scheduler.pool.match(copied.digests[:end]))
        if not first <= n_held < end or end - n_held > self._room(device):
            return
        try:
            names = copied.digests[n_held:end]
            contents = [
                checked(block, digest, device.block_bytes)
                for block, digest in zip(blocks[n_held - first :], names, strict=True)
            ]
        except (LoadError, ValueError) as error:
            raise BlocksUnavailableError(Unavailable.MISMATCH, str(error)) from error
        arrival = scheduler.transfers.expect_prefix(copied.digests[:end], copied.hashes.__getitem__)
        if arrival is None:
            return
        try:
            for at in range(0, len(contents), device.blocks_per_copy):
                part = contents[at : at + device.blocks_per_copy]
                await device.ranks.write_blocks(arrival.fresh[: len(part)], part)
                device.owner.adopt(arrival, len(part))
                self._totals.copied_blocks += len(part)
                self._totals.copied_bytes += sum(map(len, part))
        except RanksFailedError as error:
            raise BlocksUnavailableError(Unavailable.LOST, str(error)) from error
        finally:
            device.owner.finish(arrival)
        copied.n_written = min(copied.n_written + len(contents), len(copied.digests))
