"""Places of KV blocks below the device's pool, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class BlockName:
    """The identity of a block in every place. The digest covers the model, the tenant's salt and all tokens so far."""

    digest: bytes
    parent: bytes  # digest of the block before it; empty for the first one of a prefix
    hashes: tuple[int, ...]  # wire hashes


class Places(Protocol):
    """Follows the blocks of the pool, and brings blocks back into it. No method waits."""

    def published(self, block: BlockName) -> None:
        """A block of the pool became reusable; `Places` may copy it until it is evicted."""

    def evicted(self, digest: bytes) -> None:
        """The block's memory is going to be overwritten by the next plan."""

    def saved(self, digest: bytes) -> None:
        """There is a snapshot of the state at the end of the block; `Places` may copy it while `Snapshots` has it."""

    def cleared(self) -> None:
        """All blocks of the pool are lost."""

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        """Begin to load blocks of the prefix `digests`, of which a request can begin with the `first` ones already.

        With states blocks are loaded up to one at whose end there is a state, and that with them. Returns False if it
        does not save computing `worth_tokens` tokens or more. After True the request is deferred until its owner queues
        it again.
        """


class DeviceOnly:
    """No place but the pool: an evicted block is lost."""

    def published(self, block: BlockName) -> None:
        """Ignore it."""

    def evicted(self, digest: bytes) -> None:
        """Ignore it."""

    def saved(self, digest: bytes) -> None:
        """Ignore it."""

    def cleared(self) -> None:
        """Ignore it."""

    def load(self, request: Request, digests: Sequence[bytes], first: int, worth_tokens: int) -> bool:
        """There is none to load."""
        return False


DEVICE_ONLY = DeviceOnly()
