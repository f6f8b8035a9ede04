"""The inputs of a placement decision: one pool of workers at one moment, and one request.

Workers are columns of arrays, not objects: a decision over 1,000 workers takes a dozen vector operations.
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

# Longer than any transfer or computation.
NEVER_MS = 1e12


class IneligibleReason(IntEnum):
    """Why a worker is not eligible; 0: it is. `EXCLUDED` applies only while another worker is eligible."""

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
    SLEEPING = 10
    WAKING = 11

    @property
    def text(self) -> str:
        """The reason's text in `Explain`."""
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
    IneligibleReason.SLEEPING: "sleeping",
    IneligibleReason.WAKING: "waking",
}


def hash64(text: str) -> int:
    """A stable 64-bit hash, the same in every router process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def rendezvous(identities: Hashes, key: int) -> Hashes:
    """Rendezvous hashing: a score per worker, the same on every router; the key goes to the highest eligible score.

    When a worker leaves, only its own keys move (Thaler and Ravishankar, 1998).
    """
    mixed = (identities ^ np.uint64(key)) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX[1]
    return mixed ^ (mixed >> _SHIFT)


@dataclass(frozen=True, slots=True, eq=False)
class Speeds:
    """How fast the workers are, in the units of decisions.

    All arrays are [n_workers]. They are never written to: snapshots share them.
    """

    prefill_rate: Floats  # tokens per second, > 0
    similar_rate: Floats  # prefill_rate over a longer time; the median, for workers near it
    token_ms: Floats  # 1000 / similar_rate
    step_ms: Floats  # a decode step with the batch that the worker reported
    batch_ms: Floats  # a decode step, divided by (its batch + batch_doubles)
    least_batch_ms: float  # the least of batch_ms
    batch_doubles: float  # batch size at which step time doubles its intercept
    max_request_tokens: Floats  # 0: unknown
    smallest_limit: float  # the smallest known max_request_tokens
    pull_token_ms: Floats  # pulling a token's KV from another worker; NEVER_MS: impossible


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One pool. All arrays are [n_workers]."""

    worker_ids: tuple[str, ...]
    identities: Hashes  # hash64 of the worker ids
    why_not: NDArray[np.uint8]  # IneligibleReason, before the request is known
    queued_tokens: Floats  # tokens to prefill: the worker's count plus unacknowledged dispatches
    load: Floats  # requests running, waiting or not yet acknowledged
    busy: bool  # enough requests for shares of the work to matter
    share: Floats  # share of the recent work, 1 is fair; 1 for all while not busy
    excess: Floats  # tokens of recent work beyond the fair share
    load_share: Floats  # share of the load, 1 is fair; 1 for all while not busy
    speeds: Speeds


class OffloadedPrefix(NamedTuple):
    """Prefix tokens that each worker would load from below its device instead of computing them, [n_workers]."""

    tokens: Floats  # after those that its device holds
    load_ms: Floats


class AdapterLoads(NamedTuple):
    """The cost of loading one adapter at every worker, [n_workers]."""

    digest: str
    load_ms: Floats  # 0: it is in a slot, or on its way there
    waits: Floats  # 1: a slot becomes free only when running requests end; 0: no wait


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """The properties of a request that placement needs. Workers are indices into the snapshot."""

    prompt_tokens: int
    max_tokens: int = 0  # 0: as many as fit
    request_key: int = 0  # hash64 of the request id: breaks ties differently for every request
    session_key: int = 0  # hash64 of tenant and session; 0: no session
    bound: int = -1  # the worker that holds the session; -1: none or unknown
    bindings_known: bool = True  # False: Redis is away, and routers agree by hashing
    matched_tokens: Floats | None = None  # [n_workers], prefix tokens cached there; None: not known
    offloaded: OffloadedPrefix | None = None  # prefix tokens below the devices; None: there are none
    adapter: AdapterLoads | None = None  # loads of the request's adapter; None: it has none
    excluded: tuple[int, ...] = ()
    turn: int = 0  # number of the router's decisions so far


class ChosenEstimates(NamedTuple):
    """Estimates for a request at one worker."""

    matched_tokens: float  # cached at the worker; 0 if unknown
    ttft_ms: float
    itl_ms: float
    cost_ms: float  # the weighted sum of the policy's scorers
    pulled_tokens: float = 0.0  # pulled from another worker instead of computed, ...
    pull_source: int = -1  # ... which is this one, ...
    source_tokens: float = 0.0  # ... and has so many cached


class Estimates(NamedTuple):
    """Estimates for a request at every worker, [n_workers]. A tuple, since it is the fastest to make."""

    matched_tokens: Floats  # cached at the worker
    pulled_tokens: Floats  # pulled from another worker instead of computed, ...
    pull_source: int  # ... which is this one; -1: no worker pulls
    ttft_ms: Floats
    itl_ms: Floats

    def at(self, index: int, costs: Floats) -> ChosenEstimates:
        """The estimates at one worker; `costs` are those of all, [n_workers]."""
        return ChosenEstimates(
            float(self.matched_tokens[index]),
            float(self.ttft_ms[index]),
            float(self.itl_ms[index]),
            float(costs[index]),
            float(self.pulled_tokens[index]),
            self.pull_source,
            float(self.matched_tokens[self.pull_source]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A policy's decision, with the estimates at the chosen worker."""

    index: int
    reason: str
    chosen: ChosenEstimates


def why_not_for(snapshot: Snapshot, query: Query) -> NDArray[np.uint8]:
    """The IneligibleReason of every worker for this request.

    Exclusions are dropped if they would leave no worker. So is the size limit: the worker then answers by how much the
    request is too long, which is a better answer than a time-out.
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
