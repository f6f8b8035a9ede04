"""How the decodes of a text attend: the form that settings, REST and gRPC share."""

from __future__ import annotations

import re
from dataclasses import dataclass

WINDOW, TOP_K = "window", "top_k"
LEAST_PAGES = 4  # the first page, the last two and a chosen one
MOST_TOKENS = 1 << 24
# Modes without sizes; docs/long-context.md has what these cost in quality.
DEFAULTS = {WINDOW: "window(64, 4096)", TOP_K: "top_k(256)"}
_FORM = re.compile(r"(dense)|window\( *(\d{1,9}) *, *(\d{1,9}) *\)|top_k\( *(\d{1,9}) *\)")
_ALLOWED = (
    "dense, window(sinks, window) with the tokens at the beginning and at the end that decodes attend to, or "
    "top_k(pages) with the KV blocks that they attend to; "
    + ", ".join(f"{name} alone is {text}" for name, text in DEFAULTS.items())
)


@dataclass(frozen=True, slots=True)
class AttentionMode:
    """The keys that a decode attends to; without any number all of them. Field names are those of the wire."""

    sinks: int = 0  # tokens at the beginning
    window: int = 0  # tokens at the end
    pages: int = 0  # KV blocks that each KV head chooses

    @classmethod
    def parse(cls, text: str) -> AttentionMode:
        """Return the mode of a text such as `window(64, 4096)`. Raises ValueError with what is allowed."""
        form = text.strip()
        match = _FORM.fullmatch(DEFAULTS.get(form, form))
        if match is None:
            raise ValueError(f"{text!r} is not {_ALLOWED}")
        dense, sinks, window, pages = match.groups()
        if dense:
            return cls()
        mode = cls(pages=int(pages)) if pages else cls(int(sinks), int(window))
        if problem := mode.problem():
            raise ValueError(problem)
        return mode

    @property
    def name(self) -> str:
        """The kind: dense, window or top_k."""
        return TOP_K if self.pages else WINDOW if self.window else "dense"

    def problem(self) -> str:
        """Return what is wrong with the numbers; empty: nothing."""
        if self.pages:
            return _beyond("pages", self.pages, LEAST_PAGES) or (
                "pages exclude sinks and window" if self.sinks or self.window else ""
            )
        if self.window:
            return _beyond("sinks", self.sinks, 0) or _beyond("window", self.window, 1)
        return "window must be at least 1, not 0" if self.sinks else ""

    def __str__(self) -> str:
        if self.pages:
            return f"top_k({self.pages})"
        return f"window({self.sinks}, {self.window})" if self.window else "dense"


def _beyond(name: str, value: int, least: int) -> str:
    return "" if least <= value <= MOST_TOKENS else f"{name} must be {least} to {MOST_TOKENS}, not {value}"


DENSE = AttentionMode()
