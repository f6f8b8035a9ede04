"""Where a rank's memory goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes on one rank, as reported in its start-up table."""

    weights: int
    workspace: int  # peak growth during the warm-up step
    kv_cache: int
    available: int  # free to this rank after all of the above
    process: int  # before anything was loaded
    computed: int  # all but what is available, before the start

    @property
    def total(self) -> int:
        """Bytes that the rank holds."""
        return self.process + self.weights + self.workspace + self.kv_cache
