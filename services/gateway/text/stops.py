"""Stop strings: text that may begin a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text to send; `stopped` is the stop string that ended the sequence."""

    text: str
    stopped: str | None = None


class StopBuffer:
    """Holds text back while its end may begin a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> Emitted:
        """Add text; returns the text that cannot be part of a stop string, or that ends the sequence."""
        if not self._stops:
            return Emitted(text)
        text = self._held + text
        hit = self._earliest(text)
        if hit is not None:
            start, stop = hit
            self._held = ""
            return Emitted(text[: start + len(stop)] if self._include else text[:start], stop)
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return Emitted(text[: len(text) - keep])

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """The stop string that ends first, as a reader character by character would find it."""
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """The length of the longest suffix of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
