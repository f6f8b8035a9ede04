"""The server's end of the shared memory: plans go out to all ranks, messages of each rank come in."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.ipc.doorbell import Doorbell
from services.worker.ipc.life_lock import LifeLock
from services.worker.ipc.ring import RingReader, RingWriter
from services.worker.protocol.rank_config import GroupLayout, RankSettings, ServerEndpoint
from services.worker.protocol.words import Words, read_words


class GroupLink:
    """Shared memory for one run of a group; every start makes a new one."""

    def __init__(self, config: RankGroupConfig) -> None:
        layout = GroupLayout.of(config)
        self._segment = Segment.create("ranks", layout.size)
        self.doorbell = Doorbell()
        self.lines = [RankLine(self._segment, layout.control, rank) for rank in range(config.ranks)]
        self.life_locks = [LifeLock(self._segment, offset) for offset in layout.life_locks]
        for lock in self.life_locks:
            lock.prepare()
        self._plans = RingWriter(self._segment, layout.plans, layout.plan_capacity, config.ranks)
        self._results = [RingReader(self._segment, offset, layout.result_capacity, 1, 0) for offset in layout.results]
        self.staging = [self._segment.view[start : start + layout.staging_bytes] for start in layout.staging]
        self._backlog: deque[memoryview | bytes] = deque()
        endpoint = ServerEndpoint(os.getpid(), self._segment.fd, self.doorbell.write_fd, time.time())
        self.settings = RankSettings(config, endpoint)

    def send(self, message: memoryview | bytes) -> None:
        """Send a message to all ranks, now or as soon as the ring has room."""
        if self._backlog or not self._plans.try_write(message):
            self._backlog.append(message)

    def messages(self) -> Iterator[tuple[int, Words]]:
        """Yield (rank, words) for every message that arrived; messages of one rank keep their order."""
        self.doorbell.clear()
        for rank, ring in enumerate(self._results):
            while (message := ring.try_read()) is not None:
                yield rank, read_words(message)
        while self._backlog and self._plans.try_write(self._backlog[0]):
            self._backlog.popleft()

    def close(self) -> None:
        """Close the descriptors; the kernel frees the memory when no process maps it."""
        self._segment.close()
        self.doorbell.close()
