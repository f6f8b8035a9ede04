"""Distinguishes a rank that hangs from a rank that computes for long or waits for its peers.

A rank has two signs of life: its heartbeat, which also moves while it waits for a plan or for peers, and the CPU time
it uses. A rank that sleeps without a heartbeat is stuck. A rank that uses CPU time without a heartbeat may be in one
long operation, and gets more time.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.ipc.control import RankLine, RankState
from services.worker.process.process_info import ProcessInfo

_LONGEST_TICK_S = 0.3  # a longer tick is the server's own delay and does not count against a rank
_QUIET_S = 0.15  # without a heartbeat, before /proc is read
_STOPPED_S = 0.3  # without a heartbeat, before a stopped process is reported


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds without a sign of life: while asleep, and while using CPU time."""

    asleep_s: float
    busy_s: float


def is_stopped(line: RankLine) -> bool:
    """Whether the rank's process is stopped by a signal; False for a process that is gone."""
    info = ProcessInfo.read(line.pid)
    return info is not None and info.state in "Tt"


class StallDetector:
    """Watches one rank. `look` is called every 0.1 s or so while work is pending."""

    def __init__(self, line: RankLine, limits: StallLimits) -> None:
        self._line, self._limits = line, limits
        self.reset()

    def reset(self) -> None:
        """Start over, because work has just become pending or the heartbeat moved."""
        self._beats = self._line.beats
        self._cpu_s = -1.0
        self._without_beat_s = self._without_sign_s = 0.0

    def look(self, elapsed_s: float) -> str | None:
        """Return why the rank counts as stalled, or None. `elapsed_s` is the time since the last call."""
        beats = self._line.beats
        if beats != self._beats:
            self.reset()
            return None
        elapsed_s = min(elapsed_s, _LONGEST_TICK_S)
        self._without_beat_s += elapsed_s
        self._without_sign_s += elapsed_s
        if self._without_beat_s < _QUIET_S or (info := ProcessInfo.read(self._line.pid)) is None:
            return None  # RankGroupRun handles exits
        if info.state in "Tt" and self._without_beat_s >= _STOPPED_S:
            return f"process {self._line.pid} is stopped by a signal {self._where()}"
        if info.state in "RD" or info.cpu_s > self._cpu_s >= 0:
            self._without_sign_s = 0.0
        self._cpu_s = info.cpu_s
        return self._verdict()

    def _verdict(self) -> str | None:
        if self._without_sign_s >= self._limits.asleep_s:
            return (
                f"process {self._line.pid} sleeps without a heartbeat for {self._without_beat_s:.1f} s {self._where()}"
            )
        if self._without_beat_s >= self._limits.busy_s:
            return (
                f"process {self._line.pid} is busy without a heartbeat for {self._without_beat_s:.1f} s {self._where()}"
            )
        return None

    def _where(self) -> str:
        return f"at step {self._line.step} ({RankState(self._line.state).name.lower().replace('_', ' ')})"
