"""All exchange of KV blocks with other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.tls.credentials import Tls
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.copy_behind import NO_COPIES, CopyBehind, CopyLimits
from services.worker.kv_transfer.device import DeviceKv
from services.worker.kv_transfer.loader import Bandwidth, BlockLoader
from services.worker.kv_transfer.neighbour import Neighbour
from services.worker.kv_transfer.source import BlockSource
from services.worker.kv_transfer.standby import Standby
from services.worker.kv_transfer.tiers import Tiers
from services.worker.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class NeighbourLimits:
    """How blocks are exchanged."""

    pull_bytes_per_s: float = 0.0  # assumed before the first measurement; 0: never pull
    copies: CopyLimits = NO_COPIES
    tls: Tls | None = None


NO_PULLS = NeighbourLimits()


class Neighbours:
    """Pulls from other workers, reads by them, and copies in both directions."""

    def __init__(
        self,
        limits: NeighbourLimits,
        device: Callable[[], DeviceKv | None],
        tiers: Callable[[], Tiers | None],
        loader: BlockLoader,
        totals: TransferTotals,
    ) -> None:
        self._loader, self._totals, self._tls = loader, totals, limits.tls
        self._pull_speed = Bandwidth(limits.pull_bytes_per_s)
        self.source = BlockSource(device, tiers, totals)
        self.copies = CopyBehind(device, self.source, totals, limits.copies, limits.tls)
        self.standby = Standby(device, totals)

    def pull_bytes_per_s(self, device: DeviceKv | None) -> float:
        """Bandwidth of pulls; 0 if there are none."""
        return self._pull_speed.bytes_per_s() if device is None or device.shared else 0.0

    def pull(self, device: DeviceKv, request: Request, hint: pb.PullHint | None) -> None:
        """Queue a deferred request, after its prefix has come from another worker if there is a hint."""
        if hint is not None and device.shared:
            reader = Neighbour(hint, device, self._pull_speed, self._totals, self._tls)
            if self._loader.start(device, request, reader, hint.tokens):
                return
        device.owner.requeue([request])

    async def close(self) -> None:
        """Cancel all copies and loads."""
        await self.copies.close()
        await self._loader.close()
