"""When a worker should pull a prefix from another worker instead of computing it. Pure functions over a snapshot.

    compute  = tokens / prefill rate of the worker
    transfer = latency + a step of either worker + tokens * bytes of KV per token / bytes per second of its pulls
    a pull pays when transfer * PAYS <= compute

The worker measures its prefill rate on its own steps, and the bytes per second on its latest pulls, until the blocks
are in its ranks. Before the first pull, the configured value counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.pool import Pool
from services.router.snapshot import Decision, Floats, IneligibleReason, Query, Snapshot

# Both estimates are rough, and a pull takes time from the source's own requests: pull only for a clear gain.
PAYS = 2.0
LATENCY_MS = 5.0  # connecting, and one round trip

# Pulls from these workers would fail. Other ineligible workers can still serve pulls from their cache.
_SILENT = {
    IneligibleReason.DISCONNECTED,
    IneligibleReason.LOADING,
    IneligibleReason.RECOVERING,
    IneligibleReason.SILENT,
    IneligibleReason.BREAKER,
    IneligibleReason.SLEEPING,
    IneligibleReason.WAKING,
}
_READABLE = np.array([why not in _SILENT for why in IneligibleReason])


class Pulls(NamedTuple):
    """The tokens that each worker would pull from the worker that holds most. Arrays are [n_workers]."""

    source: int
    tokens: Floats  # 0: a pull does not pay
    saved_ms: Floats  # compared with computing them


def worthwhile_pulls(snapshot: Snapshot, query: Query) -> Pulls | None:
    """The pulls that pay for this request; None if none does."""
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
    own = matched if query.offloaded is None else matched + query.offloaded.tokens
    missing = np.maximum(min(deepest, query.prompt_tokens - 1.0) - own, 0.0)
    compute_ms = missing * speeds.token_ms
    transfer_ms = missing * speeds.pull_token_ms + speeds.step_ms + (LATENCY_MS + speeds.step_ms[source])
    pays = transfer_ms * PAYS <= compute_ms
    if not np.count_nonzero(pays):
        return None
    return Pulls(source, np.where(pays, missing, 0.0), np.where(pays, compute_ms - transfer_ms, 0.0))


def pull_hint(pool: Pool, snapshot: Snapshot, choice: Decision) -> worker_pb2.PullHint | None:
    """The source of the prompt's prefix for the chosen worker; None if it should compute the prefix."""
    chosen = choice.chosen
    if not chosen.pulled_tokens:
        return None
    source = pool.members.get(snapshot.worker_ids[chosen.pull_source])
    if source is None:
        return None
    return worker_pb2.PullHint(
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        address=source.address,
        tokens=int(chosen.source_tokens),
    )
