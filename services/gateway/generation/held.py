"""An answer that is held to schemas, as a whole, when it has ended: what its grammar could not enforce."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.gateway.grammar.formats import Checks
from services.gateway.tools.calls import CallDelta, join_calls


class HeldAnswer:
    """Gathers one choice's text and calls for their check."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def add(self, text: str, calls: Iterable[CallDelta]) -> None:
        """The next piece."""
        self._text.append(text)
        join_calls(self._calls, calls)

    async def check(self) -> None:
        """Raises :class:`ApiError` (400) when the answer does not follow its schema."""
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        if self._checks.text is not None and not self._calls:
            self._checks.text.hold("".join(self._text))
        for call in self._calls:
            check = self._checks.arguments.get(call.name or "")
            if check is not None:
                check.hold(call.arguments)
