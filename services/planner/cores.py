"""Cores that virtual workers share."""

from __future__ import annotations


class SharedCores:
    """Divides cores among the workers that compute, in equal parts at any time, as an operating system does.

    A worker has one thread, so it never gets more than one core. `work` is a clock that runs at a computing worker's
    speed: a step of S seconds ends when it has advanced by S, however many workers begin and end meanwhile.
    """

    def __init__(self, n_cores: int = 0) -> None:
        """`n_cores` is 0 where each worker has its own cores."""
        self._n_cores = n_cores
        self._at = self._work = 0.0  # readings of both clocks at the last change of the speed
        self._speed = 1.0

    def work(self, now: float) -> float:
        """Seconds of work at a time that is not before the last change."""
        return self._work + (now - self._at) * self._speed

    def at(self, work: float) -> float:
        """When so much work will be done, if no worker begins or ends before."""
        return self._at + (work - self._work) / self._speed

    def divide(self, now: float, n_computing: int) -> bool:
        """Divide the cores among `n_computing` workers from now on; returns whether their speed changes."""
        speed = min(1.0, self._n_cores / max(1, n_computing)) if self._n_cores else 1.0
        if speed == self._speed:
            return False
        self._at, self._work, self._speed = now, self.work(now), speed
        return True
