"""The results of a router with perfect knowledge: the bounds to compare a run with."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate

from bench.fleet.workloads import FleetRequest


def best_hit_rate(requests: Iterable[FleetRequest], block_tokens: int) -> float:
    """The share of prompt tokens that earlier requests had, with caches that hold and share everything."""
    known: set[int] = set()
    tokens = hits = 0
    for request in requests:
        ids = (*request.prompt_ids, *request.answer_ids)
        ends = range(block_tokens, len(ids) + 1, block_tokens)
        blocks = (ids[end - block_tokens : end] for end in ends)
        prefixes = list(accumulate(blocks, lambda prefix, block: hash((prefix, block)), initial=0))[1:]
        cached = (end for end, prefix in zip(ends, prefixes, strict=True) if prefix in known)
        # The last prompt token is always computed, for the first token of the answer.
        hits += max((end for end in cached if end < len(request.prompt_ids)), default=0)
        tokens += len(request.prompt_ids)
        known.update(prefixes)
    return hits / tokens if tokens else 0.0


def imbalance(computed: Sequence[float]) -> float:
    """How much more than the mean the busiest worker computed: 1.0 is even."""
    mean = sum(computed) / len(computed) if computed else 0.0
    return max(computed) / mean if mean else 1.0


def best_imbalance(requests: Iterable[FleetRequest], n_workers: int) -> float:
    """The imbalance when the largest request always goes to the idlest worker, without caches."""
    loads = [0.0] * n_workers
    for size in sorted((len(each.prompt_ids) + each.max_tokens for each in requests), reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return imbalance(loads)
