"""Prefix sharing inside a wave: blocks that a running request is about to compute, and who waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.worker.scheduling.request import Request, Status


class PromisedBlocks:
    """Digests of prompt blocks in the making, each promised by one running leader.

    A follower waits only while it is cheaper than computing the blocks again, and never for more than
    `max_steps` plans: the leader may be slow, or its blocks may turn out to be unpublishable.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._leaders: dict[bytes, Request] = {}
        self._followers: dict[bytes, list[Request]] = {}  # by the last shared digest
        self._deadlines: deque[tuple[int, bytes, Request]] = deque()

    def promise(self, leader: Request, digests: Sequence[bytes]) -> None:
        """`leader` was admitted and will compute these blocks, in this order."""
        for digest in digests:
            self._leaders.setdefault(digest, leader)

    def shared(self, digests: Sequence[bytes]) -> int:
        """How many of `digests`, from the first on, one and the same leader has promised."""
        leader = self._leaders.get(digests[0]) if digests else None
        if leader is None:
            return 0
        n = 1
        while n < len(digests) and self._leaders.get(digests[n]) is leader:
            n += 1
        return n

    def park(self, follower: Request, digest: bytes, step: int) -> None:
        """Let `follower` wait until `digest` is published or its promise is broken."""
        self._followers.setdefault(digest, []).append(follower)
        self._deadlines.append((step + self._max_steps, digest, follower))

    def settle(self, leader: Request, digests: Sequence[bytes]) -> list[Request]:
        """The promises of `leader` for `digests` are kept or broken; returns the followers to wake."""
        woken: list[Request] = []
        for digest in digests:
            if self._leaders.get(digest) is leader:
                del self._leaders[digest]
                if self._followers:
                    woken += self._followers.pop(digest, ())
        return [follower for follower in woken if follower.status is Status.PARKED]

    def expired(self, step: int) -> list[Request]:
        """Followers that have waited long enough by `step`."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= step:
            _, digest, follower = self._deadlines.popleft()
            if self.forget(follower, digest) and follower.status is Status.PARKED:
                late.append(follower)
        return late

    def forget(self, follower: Request, digest: bytes) -> bool:
        """Stop the wait of `follower` for `digest`; returns whether it was still waiting for it."""
        group = self._followers.get(digest, [])
        if follower not in group:
            return False
        group.remove(follower)
        if not group:
            del self._followers[digest]
        return True
