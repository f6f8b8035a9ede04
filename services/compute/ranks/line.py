"""Signs of life: each rank writes one cache line, which the server reads."""

from __future__ import annotations

from enum import IntEnum

from services.compute.ranks.segment import Segment

_LINE = 64
_BEAT, _STATE, _PID, _STEP, _HELD, _PROMISED = range(6)


class RankState(IntEnum):
    """Activity of a rank."""

    STARTING = 0
    IDLE = 1  # waits for a plan
    COMPUTING = 2
    IN_COLLECTIVE = 3  # waits for its peers
    LEAVING = 4
    LOADING = 5  # reads an adapter's files
    MOVING = 6  # falls asleep, or wakes


def control_bytes(ranks: int) -> int:
    """Bytes that the control lines of a group take."""
    return _LINE * ranks


class RankLine:
    """The line of one rank. Its heartbeat counter also moves while the rank waits."""

    def __init__(self, segment: Segment, offset: int, rank: int) -> None:
        self._cells = segment.words64
        self._base = (offset + _LINE * rank) // 8
        self.beats_address = segment.address + 8 * (self._base + _BEAT)

    def beat(self) -> None:
        """Raise the heartbeat counter."""
        at = self._base + _BEAT
        self._cells[at] = self._cells[at] + 1

    def enter(self, state: RankState) -> None:
        """Publish the rank's new state."""
        self._cells[self._base + _STATE] = state
        self.beat()

    def introduce(self, pid: int) -> None:
        """Publish the rank's process id."""
        self._cells[self._base + _PID] = pid

    def begin_step(self, step: int) -> None:
        """Publish the step that the rank begins."""
        self._cells[self._base + _STEP] = step

    def hold(self, n_bytes: int, promised: int = 0) -> None:
        """Publish the memory that the rank holds, and what it has yet to take for its KV cache."""
        self._cells[self._base + _HELD] = n_bytes
        self._cells[self._base + _PROMISED] = promised

    @property
    def held(self) -> int:
        """Bytes that the rank held after its start, or after its last sleep or wake, and what it has taken since."""
        return self._cells[self._base + _HELD]

    @property
    def promised(self) -> int:
        """Bytes that the rank has yet to take for its KV cache."""
        return self._cells[self._base + _PROMISED]

    @property
    def beats(self) -> int:
        """The heartbeat counter."""
        return self._cells[self._base + _BEAT]

    @property
    def state(self) -> RankState:
        """The state that the rank published last."""
        return RankState(self._cells[self._base + _STATE])

    @property
    def pid(self) -> int:
        """The rank's process id; 0 before it has published it."""
        return self._cells[self._base + _PID]

    @property
    def step(self) -> int:
        """The step that the rank began last."""
        return self._cells[self._base + _STEP]
