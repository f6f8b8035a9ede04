"""Failures of a group of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """How a failure was noticed."""

    EXITED = "exited"
    STALLED = "stalled"
    ERROR = "error"
    LAUNCH = "launch"  # the launcher itself failed, or the group was not ready in time


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failed rank and the cause. `rank` is None when no single rank is to blame."""

    rank: int | None
    kind: FailureKind
    detail: str
    signal: int | None = None
    traceback: str = ""  # traceback of the rank's exception, for the log

    def __str__(self) -> str:
        who = "the rank group" if self.rank is None else f"rank {self.rank}"
        return f"{who} {self.kind}: {self.detail}"


class RanksFailedError(RuntimeError):
    """The ranks are gone; `failure` says why."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure
