"""Parts of matrices that a rank reads from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """The `rows` and `cols` of a stored matrix."""

    key: str  # the matrix's key
    shape: tuple[int, int]  # [out, in] of the whole matrix
    rows: Span
    cols: Span

    @classmethod
    def whole(cls, key: str, shape: tuple[int, int]) -> Shard:
        """Return the shard of a whole matrix."""
        return cls(key, shape, Span(0, shape[0]), Span(0, shape[1]))
