"""When a worker should fetch a prefix from another one instead of computing it. Pure functions over a snapshot.

    compute  = tokens / prefill rate of the worker
    transfer = latency + a step of either worker + tokens * bytes of KV per token / bytes per second of its pulls
    a pull pays when transfer * PAYS <= compute

The prefill rate is measured by the worker on its own steps, the bytes per second on its latest pulls, all the way into
its ranks; before the first one they are what the worker was configured with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.pool import Pool
from services.router.snapshot import Decision, Floats, IneligibleReason, Query, Snapshot

# Both estimates are rough, and the source has other things to do: only a clear gain is taken.
PAYS = 2.0
LATENCY_MS = 5.0  # a connection, the way there and back

# Workers that get no new requests can still hand out their cache; those that do not answer cannot.
_SILENT = {
    IneligibleReason.DISCONNECTED,
    IneligibleReason.LOADING,
    IneligibleReason.RECOVERING,
    IneligibleReason.SILENT,
    IneligibleReason.BREAKER,
}
_READABLE = np.array([why not in _SILENT for why in IneligibleReason])


class Pulls(NamedTuple):
    """What each worker would fetch from the one that holds most. Arrays are [n_workers]."""

    source: int
    tokens: Floats  # 0: nothing, it does not pay
    saved_ms: Floats  # compared with computing


def worthwhile_pulls(snapshot: Snapshot, query: Query) -> Pulls | None:
    """The pulls that pay for this request; None when there are none."""
    matched, speeds = query.matched_tokens, snapshot.speeds
    if matched is None:
        return None
    all_readable = not np.count_nonzero(snapshot.why_not)
    held = matched if all_readable else np.where(_READABLE[snapshot.why_not], matched, 0.0)
    deepest = float(held[held.argmax()])
    if not deepest:
        return None
    holders = (held == deepest).nonzero()[0]
    source = int(holders[snapshot.queued_tokens[holders].argmin()])
    missing = np.maximum(min(deepest, query.prompt_tokens - 1.0) - matched, 0.0)
    compute_ms = missing * speeds.token_ms
    transfer_ms = missing * speeds.pull_token_ms + speeds.step_ms + (LATENCY_MS + speeds.step_ms[source])
    pays = transfer_ms * PAYS <= compute_ms
    if not np.count_nonzero(pays):
        return None
    return Pulls(source, np.where(pays, missing, 0.0), np.where(pays, compute_ms - transfer_ms, 0.0))


def pull_hint(pool: Pool, snapshot: Snapshot, choice: Decision) -> worker_pb2.PullHint | None:
    """Where the chosen worker should fetch the prompt's beginning from; None when it should compute it."""
    estimates = choice.estimates
    if not estimates.pulled_tokens[choice.index]:
        return None
    source = pool.members.get(snapshot.worker_ids[estimates.pull_source])
    if source is None:
        return None
    return worker_pb2.PullHint(
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        address=source.address,
        tokens=int(estimates.matched_tokens[estimates.pull_source]),
    )
