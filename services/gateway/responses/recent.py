"""The last turns of a WebSocket of /v1/responses, which `previous_response_id` goes on from without Redis."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from services.gateway.http.responses.store import Past

_TURNS = 32  # that a connection remembers


@dataclass(frozen=True, slots=True)
class _Turn:
    """A conversation, and the lane that its last response was made in."""

    past: Past
    lane: str | None


@dataclass(slots=True)
class RecentTurns:
    """The last turns of a connection, with the conversations before them."""

    most_bytes: int
    _turns: OrderedDict[str, _Turn] = field(default_factory=OrderedDict)

    def get(self, response_id: str) -> Past | None:
        """The conversation that a response ends."""
        turn = self._turns.get(response_id)
        return None if turn is None else turn.past

    def add(self, response_id: str, past: Past, lane: str | None) -> None:
        """Remember a turn of a lane."""
        self._turns[response_id] = _Turn(past, lane)
        while len(self._turns) > 1 and (len(self._turns) > _TURNS or self._bytes > self.most_bytes):
            self._turns.popitem(last=False)

    def forget(self, response_id: str, lane: str | None) -> None:
        """Forget a turn that a response of its own lane failed to go on from; other lanes may still need theirs."""
        turn = self._turns.get(response_id)
        if turn is not None and turn.lane == lane:
            del self._turns[response_id]

    @property
    def _bytes(self) -> int:
        return sum(turn.past.size for turn in self._turns.values())


@dataclass(frozen=True, slots=True)
class LaneTurns:
    """A connection's turns as one of its lanes adds to them."""

    turns: RecentTurns
    lane: str | None

    def get(self, response_id: str) -> Past | None:
        """See :class:`Recent`."""
        return self.turns.get(response_id)

    def add(self, response_id: str, past: Past) -> None:
        """See :class:`Recent`."""
        self.turns.add(response_id, past, self.lane)
