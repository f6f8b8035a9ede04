"""Prefix sharing between concurrent requests: blocks that a running request will compute, and their waiters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.worker.scheduling.request import Request, Status


class PromisedBlocks:
    """Digests of prompt blocks, each promised by one running producer.

    A wait ends after `max_steps` plans at the latest, because the producer may be slow or its blocks may have to
    stay private.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._producers: dict[bytes, Request] = {}
        self._waiters: dict[bytes, list[Request]] = {}  # by the last shared digest
        self._deadlines: deque[tuple[int, bytes, Request]] = deque()

    def promise(self, producer: Request, digests: Sequence[bytes]) -> None:
        """Record that `producer` will compute these blocks, in this order."""
        for digest in digests:
            self._producers.setdefault(digest, producer)

    def shared(self, digests: Sequence[bytes]) -> int:
        """Length of the longest prefix of `digests` that one producer has promised."""
        producer = self._producers.get(digests[0]) if digests else None
        if producer is None:
            return 0
        n = 1
        while n < len(digests) and self._producers.get(digests[n]) is producer:
            n += 1
        return n

    def wait(self, waiter: Request, digest: bytes, step: int) -> None:
        """Let `waiter` wait until `digest` is published or its promise is broken."""
        self._waiters.setdefault(digest, []).append(waiter)
        self._deadlines.append((step + self._max_steps, digest, waiter))

    def resolve(self, producer: Request, digests: Sequence[bytes]) -> list[Request]:
        """Remove the kept or broken promises of `producer` for `digests`; returns the waiters to wake."""
        woken: list[Request] = []
        for digest in digests:
            if self._producers.get(digest) is producer:
                del self._producers[digest]
                if self._waiters:
                    woken += self._waiters.pop(digest, ())
        return [waiter for waiter in woken if waiter.status is Status.DEFERRED]

    def expired(self, step: int) -> list[Request]:
        """Waiters whose longest wait ends by `step`."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= step:
            _, digest, waiter = self._deadlines.popleft()
            if self.forget(waiter, digest) and waiter.status is Status.DEFERRED:
                late.append(waiter)
        return late

    def forget(self, waiter: Request, digest: bytes) -> bool:
        """Stop the wait of `waiter` for `digest`; returns whether it was still waiting for it."""
        group = self._waiters.get(digest, [])
        if waiter not in group:
            return False
        group.remove(waiter)
        if not group:
            del self._waiters[digest]
        return True
