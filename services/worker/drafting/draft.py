"""Drafts, the proposals of drafters. Pure Python: no torch, no I/O, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

PREDICTION = "prediction"  # the drafter whose counts are part of a request's usage


class Draft(NamedTuple):
    """Tokens that a request may generate next. A NamedTuple, for speed: there may be one per token."""

    drafter: str  # its name, as in metrics
    token_ids: Sequence[int]  # at least one
    match: int  # number of last tokens of the text that the drafter found in its source; a longer match is surer


class Drafter(Protocol):
    """A source of drafts for one request. It sees the request's tokens only when it is called."""

    name: str

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """At most `most` tokens that may follow `token_ids`; None without an idea.

        `token_ids`: the request's known tokens. It is the same list in every call and only grows, so that a drafter may
        remember how much of it is indexed.
        """
