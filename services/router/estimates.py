"""What a request would take at every worker. Pure functions over a snapshot."""

from __future__ import annotations

import numpy as np

from services.router.pulls import worthwhile_pulls
from services.router.snapshot import Estimates, Floats, Query, Snapshot

# Most answers are shorter than their limit; beyond this the limit says nothing.
MAX_COUNTED_OUTPUT = 256


def estimate(snapshot: Snapshot, query: Query) -> Estimates:
    """Time to first token and between tokens, if the request went to each worker."""
    matched = pulled = np.zeros(len(snapshot.worker_ids))
    own: Floats | float = max(query.prompt_tokens, 1.0)  # at least one token is computed, however much is cached
    if query.matched_tokens is not None:
        matched = query.matched_tokens
        own = np.maximum(query.prompt_tokens - matched, 1.0)
    ttft, source = (snapshot.queued_tokens + own) * snapshot.speeds.token_ms, -1
    if (pulls := worthwhile_pulls(snapshot, query)) is not None:
        pulled, source, ttft = pulls.tokens, pulls.source, ttft - pulls.saved_ms
    itl = (snapshot.load + (snapshot.speeds.batch_doubles + 1.0)) * snapshot.speeds.batch_ms
    return Estimates(matched, pulled, source, ttft, itl)


def expected_output(query: Query) -> int:
    """How many tokens an answer is taken to have."""
    return min(query.max_tokens or MAX_COUNTED_OUTPUT, MAX_COUNTED_OUTPUT)
