"""Gives memory back that a mapped file takes while its numbers are read."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from services.compute.backends.advice import UNNEEDED, advise

_LEAST = 1 << 18  # bytes of a tensor; what smaller ones leave, the next larger one gives back
_MAPS = Path("/proc/self/maps")


def give_back_code() -> None:
    """Give back the memory of program code, which the system's page cache keeps for its next use. Raises OSError."""
    for line in _MAPS.read_text().splitlines():
        span, access, _, _, inode = line.split(maxsplit=5)[:5]
        if access == "r-xp" and inode != "0":  # never written to
            start, stop = (int(end, 16) for end in span.split("-"))
            advise(range(start, stop), UNNEEDED)


class MappedFile:
    """The mapped file of a stored tensor, which is never written to; nothing if the tensor has memory of its own.

    Its pages count as memory of the process from when they are read on. Given back they do not; the system's page cache
    keeps them, for this process and others.
    """

    def __init__(self, stored: Tensor) -> None:
        self._span = _mapped_span(stored.data_ptr()) if stored.nbytes >= _LEAST else None

    def give_back(self) -> None:
        """Give the memory of all pages back that were read. Raises OSError."""
        if self._span:
            advise(self._span, UNNEEDED)


def _mapped_span(address: int) -> range | None:
    """Return the addresses of the mapped file that holds an address; None if it is other memory."""
    with _MAPS.open("rb") as maps:
        for line in maps:  # by address
            first, _, rest = line.partition(b"-")
            end, _, _, _, inode = rest.split(maxsplit=5)[:5]
            start, stop = int(first, 16), int(end, 16)
            if address < stop:
                return range(start, stop) if start <= address and inode != b"0" else None
    return None
