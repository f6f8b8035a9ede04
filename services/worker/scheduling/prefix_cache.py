"""Blocks of a request that need no computing: cached, computed by a running request, or kept in another place."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.scheduling.block_pool import NULL_BLOCK, BlockPool
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.places import Places
from services.worker.scheduling.request import Request
from services.worker.scheduling.sharing import PromisedBlocks
from services.worker.scheduling.snapshots import Reserved, Snapshots


class PrefixCache:
    """Translates between requests and the pool, which knows digests of blocks only."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig, places: Places) -> None:
        self._pool = pool
        self._places = places
        # Blocks of models with states are of use only where there is a snapshot.
        self.snapshots = Snapshots(config, places) if config.snapshots else None
        self._block_tokens = pool.block_tokens
        self._promised = PromisedBlocks(config.share_max_steps)

    def match(self, request: Request) -> list[int]:
        """Cached blocks of the request's prefix, which never cover its last known token."""
        if not request.reads_cache:
            return []
        digests = request.block_digests(self._block_tokens, 0, self._most_hits(request))
        hits = self._pool.match(digests)
        return hits if self.snapshots is None else hits[: self.snapshots.covered(digests[: len(hits)])]

    def restore(self, request: Request, n_hits: int) -> int:
        """Row of the state at the end of the request's `n_hits` cached blocks; -1: none is needed."""
        if self.snapshots is None or not n_hits:
            return -1
        return self.snapshots.use(request.block_digests(self._block_tokens, n_hits - 1, n_hits)[0])

    def saved(self, written: Iterable[Reserved]) -> None:
        """Let others continue from states that the ranks have written."""
        for one in written:
            assert self.snapshots is not None
            self.snapshots.publish(one)

    def promise(self, producer: Request, n_hits: int) -> None:
        """Record that `producer` computes the rest of its known tokens, so that others can wait for the blocks."""
        if producer.reads_cache:
            self._promised.promise(producer, self._known_digests(producer, n_hits))

    def await_blocks(self, request: Request, n_hits: int, worth_tokens: int, step: int, *, room: bool) -> bool:
        """Let `request` wait for blocks after its `n_hits` cached ones, if they save at least `worth_tokens` tokens.

        A running request computes them, or they begin to come from another place, if there is `room` for the request.
        """
        if not request.reads_cache:
            return False
        return self._share(request, n_hits, worth_tokens, step) or self._load(request, n_hits, worth_tokens, room)

    def _share(self, request: Request, n_hits: int, worth_tokens: int, step: int) -> bool:
        if not request.patient:
            return False
        digests = request.block_digests(self._block_tokens, n_hits, self._most_hits(request))
        n_shared = self._promised.shared(digests)
        if self.snapshots is not None and n_shared < len(digests):  # the producer takes them at multiples
            at = (n_hits + n_shared) * self._block_tokens // self.snapshots.spacing * self.snapshots.spacing
            n_shared = max(0, at // self._block_tokens - n_hits)
        if n_shared == 0 or n_shared * self._block_tokens < worth_tokens:
            return False
        self._promised.wait(request, digests[n_shared - 1], step)
        return True

    def _load(self, request: Request, n_hits: int, worth_tokens: int, room: bool) -> bool:
        """Look blocks up in other places, once per wait, and again if cached ones were evicted since.

        Without room the request would wait longer than its blocks stay cached.
        """
        if request.looked_up is not None and n_hits >= request.looked_up:
            request.looked_up = n_hits
            return False
        if not room:
            return False
        request.looked_up = n_hits
        digests = request.block_digests(self._block_tokens, 0, self._most_hits(request))
        return self._places.load(request, digests, n_hits, worth_tokens)

    def expired(self, step: int) -> list[Request]:
        """Prefix waiters whose longest wait ends by `step`."""
        return self._promised.expired(step)

    def publish(self, request: Request, first: int) -> list[Request]:
        """Publish the request's full, written blocks; returns the prefix waiters of blocks from `first` on, to wake."""
        if not request.cacheable:
            return []
        size = self._block_tokens
        request.extend_digests()
        full = request.n_written // size
        digests = request.block_digests(size, request.n_published, full)
        for index, digest in enumerate(digests, start=request.n_published):
            parent = request.blocks[index - 1] if index else NULL_BLOCK
            if not self._pool.publish(request.blocks[index], parent, digest, request.block_hashes(size, index)):
                break
            request.n_published = index + 1
        return self._promised.resolve(request, request.block_digests(size, first, full))

    def withdraw(self, producer: Request) -> list[Request]:
        """Break the open promises of `producer`, which stops running; returns the prefix waiters to wake."""
        if not producer.reads_cache:
            return []
        return self._promised.resolve(producer, self._known_digests(producer, producer.n_written // self._block_tokens))

    def _most_hits(self, request: Request) -> int:
        return (len(request.token_ids) - 1) // self._block_tokens

    def _known_digests(self, request: Request, first: int) -> list[bytes]:
        return request.block_digests(self._block_tokens, first, len(request.token_ids) // self._block_tokens)
