"""The faults that an answer has met, as its client knows them: few enough that its request is not given up."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from services.gateway.generation.poison import CLEARING_TOKENS, MOST_DEATHS, SHARED_DEATHS

_IN_TRANSIT_S = 5.0  # a chunk that comes later after a fault was sent after it
_MOST_FAULTS = 2  # without a token between; gateways give a request up after the fourth (RYZANSTEIN_MAX_FAULTS)


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault of workers."""

    workers: Set[str] = frozenset()
    deadly: bool = False  # the requests in their steps may have killed them


@dataclass(slots=True)
class Interruptions:
    """The attempts of an answer, and the faults that may have ended the last one.

    A stream names its worker with the first token of each attempt. So a fault on other workers does not count, nor one
    after which the same worker gave more. Where the worker is not known, every fault counts.
    """

    worker: str = ""  # that gave the last token; empty: there is none yet
    attempts: int = 1
    _chunks: int = 0  # since the last attempt began; each has a token or more
    _deaths: int = 0  # since so many tokens that gateways count from zero again
    _deaths_in_all: int = 0
    _faults: int = 0  # that may have ended the last attempt
    _deadly: int = 0  # the deadly ones among these
    _struck_at: float = -math.inf

    def grew(self, now: float, worker: str = "", attempt: int = 0) -> None:
        """A chunk came; the first of an attempt names its worker. `now`: of the monotonic clock."""
        if attempt:
            deaths = min(attempt - self.attempts, self._deadly)
            self._deaths, self._deaths_in_all = self._deaths + deaths, self._deaths_in_all + deaths
            self._deadly -= deaths
            self.worker, self.attempts, self._chunks = worker, attempt, 0
        self._chunks += 1
        if now > self._struck_at + _IN_TRANSIT_S:
            self._faults = self._deadly = 0
        if self._chunks >= CLEARING_TOKENS:
            self._deaths = 0

    def bears(self, blow: Blow) -> bool:
        """Whether the request is surely not given up after the blow, nor one of many suspects.

        A request is a suspect of poison after two deaths at one place, and poison after a third before a token or after
        the eighth in all. Workers compute their suspects one after the other, so only a fault of one worker may make
        some, of requests that live.
        """
        if not self._may_run_on(blow.workers):
            return True
        if self._faults >= _MOST_FAULTS:
            return False
        if not blow.deadly:
            return True
        spared = len(blow.workers) == 1 and self.worker and not self._faults
        few = self._deaths + self._deadly < SHARED_DEATHS - 1 + bool(spared)
        return few and self._deaths_in_all + self._deadly < MOST_DEATHS - 1

    def strike(self, blow: Blow, now: float) -> None:
        """The blow strikes."""
        if self._may_run_on(blow.workers):
            self._faults, self._deadly, self._struck_at = self._faults + 1, self._deadly + blow.deadly, now

    def _may_run_on(self, workers: Set[str]) -> bool:
        return bool(workers) and (not self.worker or self._faults > 0 or self.worker in workers)
