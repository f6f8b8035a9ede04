"""Wakes the streams that report changes to routers and coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """Announcements without contents: a woken watcher reads the data it needs. Watchers do not poll."""

    def __init__(self) -> None:
        self._watchers: set[asyncio.Event] = set()

    def announce(self) -> None:
        """Wake every watcher; cheap enough for every step."""
        for event in self._watchers:
            event.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that every announcement sets, until the end of the `with` block."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)
