"""An assistant's text as a message: reasoning, content, calls."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct

from services.gateway.generation.tokens import FinishReason
from services.gateway.reasoning.think import ReasoningParser
from services.gateway.tools.calls import CallDelta
from services.gateway.tools.parser import CallReader

_ID_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_call_id() -> str:
    """Nine letters and digits: all that Mistral's templates take."""
    return "".join(random.choices(_ID_CHARS, k=9))


class MessageDelta(Struct, frozen=True):
    """The additions of a piece of text to the message."""

    content: str
    reasoning: str
    calls: list[CallDelta]
    reasoning_pieces: int  # how many of the pieces are reasoning, with the ends of its tags


class MessageReader:
    """Reads one choice's text, piece by piece."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallReader | None, finish: FinishReason) -> None:
        """`finish` is the reason to end of a message with calls."""
        self._reasoning = reasoning
        self._calls = calls
        self._finish = finish
        self._called = False

    @property
    def reasons(self) -> bool:
        """Whether reasoning may follow."""
        return self._reasoning is not None and not self._reasoning.done

    def read(self, pieces: Sequence[str], *, final: bool) -> MessageDelta:
        """The next pieces, one for each token while the message `reasons`; the last ones are `final`."""
        reasoning, answer, count = self._reason(pieces)
        if final and self._reasoning is not None:
            rest = self._reasoning.finish()
            reasoning, answer = reasoning + rest[0], answer + rest[1]
        if self._calls is None:
            return MessageDelta(answer, reasoning, [], count)
        parsed = self._calls.push(answer)
        content, calls = parsed.content, parsed.calls
        if final:
            last = self._calls.finish()
            content, calls = content + last.content, calls + last.calls
        for call in calls:
            if call.name is not None:
                call.id = new_call_id()
        self._called = self._called or bool(calls)
        return MessageDelta(content, reasoning, calls, count)

    def _reason(self, pieces: Sequence[str]) -> tuple[str, str, int]:
        """Reasoning, answer, and how many pieces are reasoning."""
        if self._reasoning is None:
            return "", "".join(pieces), 0
        reasoning, answer, count = "", "", 0
        for position, piece in enumerate(pieces):
            if self._reasoning.done:
                return reasoning, answer + self._reasoning.push("".join(pieces[position:]))[1], count
            thought, text = self._reasoning.push(piece)
            reasoning, answer, count = reasoning + thought, answer + text, count + self._reasoning.begun
        return reasoning, answer, count

    def finish_of(self, finish: FinishReason) -> FinishReason:
        """Why the message has ended, given why its text has."""
        return self._finish if self._called and finish is FinishReason.STOP else finish
