"""Classifies the difference between an answer and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Answer:
    """An answer as a client received it."""

    text: str = ""
    ids: tuple[int, ...] = ()
    finish: str = ""


class Difference(StrEnum):
    """Kinds of wrong answers."""

    NONE = "none"
    LOST = "tokens lost"
    DUPLICATED = "tokens duplicated"
    OTHER = "other tokens"
    TEXT = "same tokens, other text or end"


def difference(expected: Answer, got: Answer) -> Difference:
    """Name the difference between two answers."""
    if got == expected:
        return Difference.NONE
    if got.ids == expected.ids:
        return Difference.TEXT
    if _within(got.ids, expected.ids):
        return Difference.LOST
    if _within(expected.ids, got.ids):
        return Difference.DUPLICATED
    return Difference.OTHER


def _within(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `part` is a subsequence of `whole`."""
    remaining = iter(whole)
    return all(token in remaining for token in part)
