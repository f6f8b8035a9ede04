"""Names of the workers' phases."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb


def phase_name(phase: int) -> str:
    """The phase's name in lower case, for messages, leases and labels; a newer worker's phase has its number."""
    name = pb.Phase.Name(phase) if phase in pb.Phase.values() else f"phase_{phase}"
    return name.removeprefix("PHASE_").lower()
