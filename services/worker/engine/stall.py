"""Distinguishes processes that hang from processes that compute for long or wait for each other.

A process has two signs of life: its heartbeat, which it or its group publishes, and the CPU time it uses. Processes
that sleep without a heartbeat are stuck. Processes that use CPU time without a heartbeat may be in one long operation,
and get more time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.worker.engine.process_info import ProcessInfo

_LONGEST_TICK_S = 0.3  # a longer tick is the server's own delay and does not count against a process
_QUIET_S = 0.15  # without a heartbeat, before /proc is read
_STOPPED_S = 0.3  # without a heartbeat, before a stopped process is reported


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds without a sign of life: while asleep, and while using CPU time."""

    asleep_s: float
    busy_s: float


def find_stopped(pids: Iterable[int]) -> int | None:
    """The first process that is stopped by a signal; processes that are gone are skipped."""
    return next((pid for pid in pids if (info := ProcessInfo.read(pid)) is not None and info.state in "Tt"), None)


class StallDetector:
    """Watches processes that share a heartbeat. `look` is called every 0.1 s or so while work is pending."""

    def __init__(
        self, pids: Sequence[int], beats: Callable[[], int], where: Callable[[], str], limits: Callable[[], StallLimits]
    ) -> None:
        """`beats`: the heartbeat counter; `where`: what the processes do, for the reason; `limits`: of that."""
        self._pids, self._read_beats, self._where, self._read_limits = pids, beats, where, limits
        self.signs = 0  # grows with every look that found a sign of life
        self.reset()

    def reset(self) -> None:
        """Start over, because work has just become pending or the heartbeat moved."""
        self._beats = self._read_beats()
        self._cpu_s = -1.0
        self._without_beat_s = self._without_sign_s = 0.0

    def look(self, elapsed_s: float) -> str | None:
        """Return why the processes count as stalled, or None. `elapsed_s` is the time since the last call."""
        if self._read_beats() != self._beats:
            self.signs += 1
            self.reset()
            return None
        elapsed_s = min(elapsed_s, _LONGEST_TICK_S)
        self._without_beat_s += elapsed_s
        self._without_sign_s += elapsed_s
        if self._without_beat_s < _QUIET_S:
            return None
        infos = [info for pid in self._pids if (info := ProcessInfo.read(pid))]
        if len(infos) < len(self._pids):
            return None  # exits are noticed elsewhere
        if self._without_beat_s >= _STOPPED_S and (pid := find_stopped(self._pids)):
            return f"process {pid} is stopped by a signal {self._where()}"
        cpu_s = sum(info.cpu_s for info in infos)
        if any(info.state in "RD" for info in infos) or cpu_s > self._cpu_s >= 0:
            self.signs += 1
            self._without_sign_s = 0.0
        self._cpu_s = cpu_s
        return self._verdict()

    def _verdict(self) -> str | None:
        more = f" (and {len(self._pids) - 1} more)" if len(self._pids) > 1 else ""
        who, silent_s, where = f"{self._pids[0]}{more}", self._without_beat_s, self._where()
        limits = self._read_limits()
        if self._without_sign_s >= limits.asleep_s:
            return f"process {who} sleeps without a heartbeat for {silent_s:.1f} s {where}"
        if silent_s >= limits.busy_s:
            return f"process {who} is busy without a heartbeat for {silent_s:.1f} s {where}"
        return None
