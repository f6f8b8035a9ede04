"""The phases of a worker as data: one table says which phase may follow which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ryzanstein.v1 import worker_pb2 as pb

from services.common.phases import phase_name

log = logging.getLogger(__name__)

TRANSITIONS: Mapping[pb.Phase, frozenset[pb.Phase]] = {
    pb.PHASE_LOADING: frozenset({pb.PHASE_SERVING, pb.PHASE_DRAINING}),
    pb.PHASE_SERVING: frozenset({pb.PHASE_SLEEPING, pb.PHASE_RECOVERING, pb.PHASE_DRAINING}),
    pb.PHASE_SLEEPING: frozenset({pb.PHASE_WAKING, pb.PHASE_DRAINING}),  # lost processes start again with the wake
    pb.PHASE_WAKING: frozenset({pb.PHASE_SERVING, pb.PHASE_RECOVERING, pb.PHASE_DRAINING}),
    pb.PHASE_RECOVERING: frozenset({pb.PHASE_SERVING, pb.PHASE_DRAINING}),
    pb.PHASE_DRAINING: frozenset(),  # the process will end
}
STARTING = frozenset({pb.PHASE_LOADING, pb.PHASE_WAKING, pb.PHASE_RECOVERING})  # SERVING follows


class ForbiddenPhaseError(RuntimeError):
    """A phase was entered that cannot follow the current one: an error of ours."""


class Lifecycle:
    """The phase of one engine, and why it does not serve."""

    def __init__(self, detail: str, entered: Callable[[], None]) -> None:
        """`detail`: message for people while the engine loads. Calls `entered` after every change."""
        self.phase: pb.Phase = pb.PHASE_LOADING
        self.detail = detail
        self.warming = False  # the weights are loaded, and first steps are computed
        self._entered = entered

    def enter(self, phase: pb.Phase, detail: str, *, warming: bool = False) -> None:
        """Enter a phase, or change the detail of the current one. While draining, only the detail changes.

        Raises ForbiddenPhaseError.
        """
        if self.phase == pb.PHASE_DRAINING:
            phase = pb.PHASE_DRAINING
        if phase != self.phase and phase not in TRANSITIONS[self.phase]:
            raise ForbiddenPhaseError(f"{phase_name(phase)} cannot follow {phase_name(self.phase)}")
        self.phase, self.detail, self.warming = phase, detail, warming
        log.info("phase %s", phase_name(phase), extra={"detail": detail})
        self._entered()
