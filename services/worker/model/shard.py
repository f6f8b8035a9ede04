"""A range of one dimension."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start
