"""Why an engine that does not serve leaves a request to another worker, by its phase."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

DRAINING = pb.Handoff(reason=pb.Handoff.REASON_DRAIN, detail="the worker is draining")
REFUSALS = {
    pb.PHASE_LOADING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is still loading its model"),
    # Not RANKS_LOST: the lost ranks did not compute this request, so it is no suspect.
    pb.PHASE_RECOVERING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is restarting its ranks"),
    pb.PHASE_DRAINING: DRAINING,
}
