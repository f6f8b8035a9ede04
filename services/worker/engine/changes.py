"""Wakes the streams that tell others what changed here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """Announcements without contents: a watcher that is woken reads what it needs. Nobody polls."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Event] = set()

    def announce(self) -> None:
        """Wake every watcher; cheap enough for every step."""
        for event in self._watchers:
            event.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set by every announcement until the block is left."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)
