"""What a placement decision sees: one pool of workers at one moment, and one request.

Workers are columns of arrays and not objects: a decision over 1,000 of them is a dozen vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Hashes = NDArray[np.uint64]

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = np.uint64(31)

# Longer than any transfer or computation takes.
NEVER_MS = 1e12


class IneligibleReason(IntEnum):
    """Why a worker is not eligible; 0 is eligible. From `EXCLUDED` on: only while another worker is left."""

    ELIGIBLE = 0
    DISCONNECTED = 1
    LOADING = 2
    RECOVERING = 3
    DRAINING = 4
    SILENT = 5
    BREAKER = 6
    SATURATED = 7
    TOO_SMALL = 8
    EXCLUDED = 9

    @property
    def text(self) -> str:
        """What `Explain` says."""
        return _TEXTS[self]


_TEXTS = {
    IneligibleReason.ELIGIBLE: "",
    IneligibleReason.DISCONNECTED: "state stream broken",
    IneligibleReason.LOADING: "loading",
    IneligibleReason.RECOVERING: "recovering",
    IneligibleReason.DRAINING: "draining",
    IneligibleReason.SILENT: "no state for too long",
    IneligibleReason.BREAKER: "breaker open",
    IneligibleReason.SATURATED: "saturated",
    IneligibleReason.TOO_SMALL: "too small",
    IneligibleReason.EXCLUDED: "excluded",
}


def hash64(text: str) -> int:
    """A stable 64-bit hash: the same in every router process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def rendezvous(identities: Hashes, key: int) -> Hashes:
    """A score per worker that every router computes alike; the highest eligible one has the key.

    When a worker leaves, only its own keys move (Thaler and Ravishankar, 1998).
    """
    mixed = (identities ^ np.uint64(key)) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX[1]
    return mixed ^ (mixed >> _SHIFT)


@dataclass(frozen=True, slots=True, eq=False)
class Speeds:
    """How fast the workers are, in the terms that decisions count with.

    All arrays are [n_workers] and never written to: snapshots share them.
    """

    prefill_rate: Floats  # tokens per second, > 0
    similar_rate: Floats  # as prefill_rate over a longer time, where workers that are about equally fast are equal
    token_ms: Floats  # of prefill: 1000 / similar_rate
    step_ms: Floats  # of a decode step with the batch that the worker told
    batch_ms: Floats  # of a decode step for each request in its batch, `batch_doubles` added to them
    batch_doubles: float  # the batch at which a step takes twice as long as for nobody
    max_request_tokens: Floats  # 0: unknown
    smallest_limit: float  # of those that are known
    pull_token_ms: Floats  # to get a token's KV from another worker; NEVER_MS: it cannot


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One pool. All arrays are [n_workers]."""

    worker_ids: tuple[str, ...]
    identities: Hashes  # hash64 of the worker ids
    why_not: NDArray[np.uint8]  # IneligibleReason, before the request is known
    queued_tokens: Floats  # prefill: the worker's own count plus dispatches it has not acknowledged
    load: Floats  # requests running, waiting or not yet acknowledged
    busy: bool  # enough that shares of the work matter
    share: Floats  # of the recent work, 1 is fair; 1 for all while not busy
    excess: Floats  # tokens of it beyond the fair share
    load_share: Floats  # of the load, 1 is fair; 1 for all while not busy
    speeds: Speeds


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One request, as far as placement is concerned. Workers are indices into the snapshot."""

    prompt_tokens: int
    max_tokens: int = 0  # 0: as many as fit
    request_key: int = 0  # hash64 of the request id: breaks ties differently for every request
    session_key: int = 0  # hash64 of tenant and session; 0: not sticky
    bound: int = -1  # the worker that holds the session; -1: none that is known
    bindings_known: bool = True  # False: Redis is away, so that routers must agree without it
    matched_tokens: Floats | None = None  # [n_workers], prefix tokens cached there; None: not known
    excluded: tuple[int, ...] = ()
    turn: int = 0  # counts the router's decisions


def matched_at(query: Query, index: int) -> float:
    """Prefix tokens that a worker has cached, as far as that is known."""
    return float(query.matched_tokens[index]) if query.matched_tokens is not None else 0.0


class Estimates(NamedTuple):
    """What to expect of a request at every worker, [n_workers]. A tuple, which is made soonest."""

    matched_tokens: Floats  # cached there
    pulled_tokens: Floats  # fetched from another worker instead of being computed, ...
    pull_source: int  # ... from this one; -1: nobody fetches anything
    ttft_ms: Floats
    itl_ms: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A policy's decision and what it was made from."""

    index: int
    reason: str
    estimates: Estimates
    costs: Floats  # [n_workers], the weighted sum of the policy's scorers in milliseconds


def why_not_for(snapshot: Snapshot, query: Query) -> NDArray[np.uint8]:
    """Eligibility of every worker for this request.

    Exclusions are dropped when they leave nobody, and so is the size limit: the worker itself then says by how much
    the request is too long, which is a better answer than a time-out.
    """
    fitting = hard = snapshot.why_not
    needed = query.prompt_tokens + max(query.max_tokens, 1)
    if needed > snapshot.speeds.smallest_limit:
        limits = snapshot.speeds.max_request_tokens
        small = (limits > 0) & (limits < needed) & (hard == 0)
        fitting = np.where(small, np.uint8(IneligibleReason.TOO_SMALL), hard)
        if not np.count_nonzero(fitting == 0):
            fitting = hard
    if not query.excluded:
        return fitting
    wanted = fitting.copy()
    excluded = np.array(query.excluded)
    wanted[excluded] = np.where(wanted[excluded] == 0, np.uint8(IneligibleReason.EXCLUDED), wanted[excluded])
    return wanted if np.count_nonzero(wanted == 0) else fitting
