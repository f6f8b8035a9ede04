"""An assistant's text as a message: reasoning, content, calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.generation.tokens import FinishReason
from services.gateway.reasoning.think import ReasoningParser
from services.gateway.tools.calls import CallDelta
from services.gateway.tools.parser import CallReader

_ID_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_call_id() -> str:
    """Nine letters and digits: all that Mistral's templates take."""
    return "".join(random.choices(_ID_CHARS, k=9))


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The additions of a piece of text to the message."""

    content: str
    reasoning: str
    calls: list[CallDelta]


class MessageReader:
    """Reads one choice's text, piece by piece."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallReader | None, finish: FinishReason) -> None:
        """`finish` is the reason to end of a message with calls."""
        self._reasoning = reasoning
        self._calls = calls
        self._finish = finish
        self._called = False

    def read(self, text: str, *, final: bool) -> MessageDelta:
        """The next piece; the last one is `final`."""
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        if final and self._reasoning is not None:
            rest = self._reasoning.finish()
            reasoning, answer = reasoning + rest[0], answer + rest[1]
        if self._calls is None:
            return MessageDelta(answer, reasoning, [])
        found = self._calls.push(answer)
        content, calls = found.content, found.calls
        if final:
            rest_found = self._calls.finish()
            content, calls = content + rest_found.content, calls + rest_found.calls
        for call in calls:
            if call.name is not None:
                call.id = new_call_id()
        self._called = self._called or bool(calls)
        return MessageDelta(content, reasoning, calls)

    def finish_of(self, finish: FinishReason) -> FinishReason:
        """Why the message has ended, given why its text has."""
        return self._finish if self._called and finish is FinishReason.STOP else finish


NewReader = Callable[[], MessageReader]
