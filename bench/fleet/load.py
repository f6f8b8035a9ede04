"""An open-loop load on gateways, and its answers, which are checked to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from bench.fleet.interruptions import Interruptions
from bench.fleet.workloads import FleetRequest


@dataclass(slots=True)
class FleetAnswer:
    """A client's answer to a request; times are seconds."""

    request: FleetRequest
    late_s: float  # between the arrival and its sending: the generator's own delay
    at: float = 0.0  # when it was sent, after the load's begin
    first_token_s: float = 0.0
    seconds: float = 0.0
    text: str = ""
    finish: str = ""
    cached_tokens: int = 0
    error: str = ""
    ended: bool = False
    interruptions: Interruptions = field(default_factory=Interruptions)

    @property
    def pace_s(self) -> float:
        """From token to token, on average; 0 for one token."""
        return (self.seconds - self.first_token_s) / max(1, self.request.max_tokens - 1)

    def lost(self) -> bool:
        """Whether the answer did not come whole."""
        return bool(self.error) or not self.finish

    def altered(self, tokenizer: Tokenizer) -> bool:
        """Whether a whole answer differs from the right one."""
        right = tokenizer.decode(list(self.request.answer_ids))
        return not self.lost() and (self.text, self.finish) != (right, "length")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive whatever the answers do, while fewer than `streams` are open; to the gateways in turn."""

    urls: Sequence[str]
    model: str
    rate: float  # requests a second
    seconds: float
    streams: int = 0  # the most that are open at a time; 0: without a bound
    patience_s: float = 180.0  # an answer that gets no token for so long is lost


def most_open(answers: Sequence[FleetAnswer]) -> int:
    """The most answers that were open at a time."""
    changes = sorted([(each.at, 1) for each in answers] + [(each.at + each.seconds, -1) for each in answers])
    return max(itertools.accumulate(change for _, change in changes), default=0)
