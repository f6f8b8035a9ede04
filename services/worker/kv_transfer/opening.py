"""Opens the places of KV blocks below the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from services.common.lifecycle import StartupError
from services.worker.engine.base import Engine
from services.worker.engine.kv_events import BlockPlace
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.device import BlockSizes, block_bytes
from services.worker.kv_transfer.disk_store import DiskStore
from services.worker.kv_transfer.host_store import HostStore
from services.worker.kv_transfer.loader import BlockLoader
from services.worker.kv_transfer.tiers import Tiers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the places below the device, as the settings name them."""

    host_bytes: int = 0  # 0: none
    disk_path: str = ""  # empty: none
    disk_bytes: int = 0
    disk_write_bytes_per_s: float = 1.0

    def check(self) -> None:
        """Make the disk's folder, and see that it can be written to. Raises StartupError."""
        if not self.disk_path:
            return
        folder = Path(self.disk_path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".rz-kv-probe-{id(self)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _unusable(self.disk_path, error) from error


NO_TIERS = TierSizes()


def open_tiers(
    sizes: TierSizes,
    block_sizes: BlockSizes,
    engine: Engine,
    loader: BlockLoader,
) -> Tiers:
    """The places for an engine's blocks and states. Raises StartupError for sizes and paths that cannot work."""
    events, totals, layout = engine.kv_events, engine.transfers, block_sizes.layout
    stores: list[BlockStore] = []
    size = block_bytes(layout)
    if not size and (sizes.host_bytes or sizes.disk_path):
        log.warning("this model's KV blocks cannot be moved: neither host nor disk keeps them")
        sizes = NO_TIERS
    try:
        if sizes.host_bytes:
            totals.places[BlockPlace.HOST] = PlaceTotals()
            stores.append(HostStore(size, sizes.host_bytes, events, totals.places[BlockPlace.HOST]))
        if sizes.disk_path:
            totals.places[BlockPlace.DISK] = PlaceTotals()
            stores.append(
                DiskStore(
                    Path(sizes.disk_path),
                    layout,
                    size,
                    sizes.disk_bytes,
                    sizes.disk_write_bytes_per_s,
                    events,
                    totals.places[BlockPlace.DISK],
                )
            )
    except ValueError as error:
        name = "RYZANSTEIN_DISK_CACHE_GIB" if stores or not sizes.host_bytes else "RYZANSTEIN_HOST_CACHE_GIB"
        raise StartupError(f"{name}: {error}") from error
    except OSError as error:
        raise _unusable(sizes.disk_path, error) from error
    for store in stores:
        if store.capacity <= block_sizes.n_pieces:
            name = "RYZANSTEIN_HOST_CACHE_GIB" if store.place is BlockPlace.HOST else "RYZANSTEIN_DISK_CACHE_GIB"
            room, state = store.totals.capacity_bytes, block_sizes.n_pieces * size
            raise StartupError(f"{name}: {room:,} bytes hold no block with the state at its end, which has {state:,}")
    return Tiers(stores, loader, events, engine.changes.announce)


def _unusable(path: str, error: OSError) -> StartupError:
    return StartupError(f"RYZANSTEIN_DISK_CACHE {path}: {error.strerror or error}")
