"""Memory use of a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes on one rank, as reported in its start-up table."""

    weights: int
    workspace: int  # peak growth during the warm-up step
    kv_cache: int
    available: int  # free memory for this rank after the start
    process: int  # memory of the process before the model was loaded
    computed: int  # predicted use before the start, all of the above except `available`
    graphs: int = 0  # captured steps, on GPUs

    @property
    def total(self) -> int:
        """Bytes in use by the rank."""
        return self.process + self.weights + self.workspace + self.kv_cache + self.graphs
