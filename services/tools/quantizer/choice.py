"""Chooses the bits of each set of linear layers by the relative error of its outputs per byte. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One unit with few and with more bits; errors are relative: squared error over squared outputs."""

    few_error: float
    more_error: float
    few_bytes: int
    more_bytes: int

    @property
    def worth(self) -> float:
        """The error that an additional byte removes; at most 0: it never gets more bits."""
        return (self.few_error - self.more_error) / (self.more_bytes - self.few_bytes)


def choose(candidates: Mapping[str, Candidate], extra: float) -> frozenset[str]:
    """Return the units that get more bits: those worth most, while they add at most `extra` of all bytes.

    `extra` is a share of the bytes of all units with few bits. Units worth the same are taken by name.
    """
    left = extra * sum(candidate.few_bytes for candidate in candidates.values())
    chosen = set()
    for name, candidate in sorted(candidates.items(), key=lambda item: (-item[1].worth, item[0])):
        added = candidate.more_bytes - candidate.few_bytes
        if candidate.worth > 0 and added <= left:
            chosen.add(name)
            left -= added
    return frozenset(chosen)
