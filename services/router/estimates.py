"""How long a request would take at every worker. Pure functions over a snapshot."""

from __future__ import annotations

import numpy as np

from services.router.pulls import worthwhile_pulls
from services.router.snapshot import Estimates, Floats, Query, Snapshot

# Most answers are shorter than `max_tokens`, so that a larger limit does not predict a longer answer.
MAX_COUNTED_OUTPUT = 256


def estimate(snapshot: Snapshot, query: Query) -> Estimates:
    """Time to first token and time between tokens of the request at each worker."""
    matched = pulled = np.zeros(len(snapshot.worker_ids))
    own: Floats | float = max(query.prompt_tokens, 1.0)  # a worker computes at least one token, even if all are cached
    if query.matched_tokens is not None:
        matched = query.matched_tokens
        own = np.maximum(query.prompt_tokens - matched, 1.0)
    ttft, source = (snapshot.queued_tokens + own) * snapshot.speeds.token_ms, -1
    if query.offloaded is not None:
        loaded = np.minimum(query.offloaded.tokens, own - 1.0)
        ttft = ttft - loaded * snapshot.speeds.token_ms + np.where(loaded > 0, query.offloaded.load_ms, 0.0)
    if (pulls := worthwhile_pulls(snapshot, query)) is not None:
        pulled, source, ttft = pulls.tokens, pulls.source, ttft - pulls.saved_ms
    itl = (snapshot.load + (snapshot.speeds.batch_doubles + 1.0)) * snapshot.speeds.batch_ms
    return Estimates(matched, pulled, source, ttft, itl)


def expected_output(query: Query) -> int:
    """The assumed length of an answer, in tokens."""
    return min(query.max_tokens or MAX_COUNTED_OUTPUT, MAX_COUNTED_OUTPUT)
