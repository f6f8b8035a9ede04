"""The outputs of a sequence, with times: for the comparison of two models that answer the same request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from services.gateway.errors import GRAMMAR_FAILED, ApiError


@dataclass(slots=True)
class SequenceRecord:
    """The tokens of one sequence and their times, in seconds from its begin."""

    ids: list[int] = field(default_factory=list)
    error: str = ""  # code of the error that has ended it
    first_s: float = 0.0  # time of the first token
    last_s: float = 0.0  # time of the last token
    finished: bool = False  # the model has ended it, or its tokens were all used
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _began: float = field(default_factory=perf_counter)

    def add(self, ids: Sequence[int], *, finished: bool) -> None:
        """Tokens have come."""
        self.last_s = perf_counter() - self._began
        self.first_s = self.first_s or self.last_s
        self.ids += ids
        self.finished = finished

    def fail(self, error: ApiError) -> None:
        """The sequence has ended with an error."""
        self.error = error.code or str(error.status)

    @property
    def refused_by_grammar(self) -> bool:
        """Whether the model's text could not be kept to its grammar or schema."""
        return self.error == GRAMMAR_FAILED

    @property
    def pace_s(self) -> float:
        """Mean time between tokens after the first one; 0: not known."""
        return (self.last_s - self.first_s) / (len(self.ids) - 1) if len(self.ids) > 1 else 0.0

    def differs_at(self, other: SequenceRecord) -> int | None:
        """The position of the first token that is another one; None: none, as far as both have come."""
        for position, (mine, theirs) in enumerate(zip(self.ids, other.ids, strict=False)):
            if mine != theirs:
                return position
        shorter, longer = sorted((self, other), key=lambda recording: len(recording.ids))
        return len(shorter.ids) if shorter.finished and len(longer.ids) > len(shorter.ids) else None
