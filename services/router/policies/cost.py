"""The default policy: the worker where the request ends soonest, sticky as long as that is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.pulls import worthwhile_pulls
from services.router.snapshot import Choice, Floats, Query, Snapshot, Terms, rendezvous

# Most answers are shorter than their limit; beyond this the limit says nothing.
MAX_COUNTED_OUTPUT = 256
# The batch at which a decode step takes twice as long as for one request: reading the weights costs as much as
# this many requests' attention and activations. Only ratios between near batch sizes depend on it.
BATCH_DOUBLES_STEP = 64.0

# What staying with its worker may cost a session beyond the cheapest one. Wide, since costs swing with every prompt
# that arrives somewhere, and who moves has to be computed again: a queue makes sessions move, and moves make queues.
KEEP_FACTOR, KEEP_MS = 2.0, 100.0
# What evening out may cost: all that is asked of a worker that is no session's own.
EVEN_FACTOR, EVEN_MS = 1.25, 50.0
# A worker that has had more than this share of the recent work, and as many requests more than its share, gives
# sessions away. New ones even out most: in the simulation of test_conversations.py 1 to 3 turns in a hundred move.
FAIR_SHARE, FAIR_REQUESTS = 1.04, 4
# Shares this close are equal.
SAME_SHARE = 0.01
# Costs this close are equal: they differ by less than the state's age, and a strict minimum would send everything
# that arrives between two states to one worker.
TIE_FACTOR, TIE_MS = 1.02, 1.0


def cost_terms(snapshot: Snapshot, query: Query, decode_weight: float) -> Terms:
    """Time to first token and a share of the decode time, if the request went to each worker."""
    matched = query.matched_tokens if query.matched_tokens is not None else np.zeros(len(snapshot.worker_ids))
    # At least one token is computed, however much is cached.
    own = np.maximum(query.prompt_tokens - matched, 1.0)
    ttft = (snapshot.queued_tokens + own) / snapshot.speeds.prefill_rate * 1000.0
    pulled, source = np.zeros(len(matched)), -1
    if (pulls := worthwhile_pulls(snapshot, query)) is not None:
        pulled, source, ttft = pulls.tokens, pulls.source, ttft - pulls.saved_s * 1000.0
    growth = (BATCH_DOUBLES_STEP + snapshot.load + 1.0) / (BATCH_DOUBLES_STEP + snapshot.speeds.step_batch)
    itl = snapshot.speeds.step_ms * growth
    return Terms(matched, pulled, source, ttft, itl, ttft + decode_weight * _output(query) * itl)


def cheapest(costs: Floats, snapshot: Snapshot, request_key: int) -> int:
    """The lowest cost; ties go to a worker that differs from request to request, but not between routers."""
    best = costs.min()
    ties = np.flatnonzero(costs <= best * TIE_FACTOR + TIE_MS)
    if len(ties) == 1:
        return int(ties[0])
    return int(ties[rendezvous(snapshot.identities[ties], request_key).argmax()])


@dataclass(frozen=True)
class CostPolicy:
    """Affinity and load in one currency: milliseconds."""

    decode_weight: float
    uses_prefixes: ClassVar[bool] = True
    uses_sessions: ClassVar[bool] = True

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """Keep the session's worker while it is bearable: at most 1.25 times the minimum plus 50 ms.

        A new session goes to the bearable worker that has had the least of the recent work, and so does one whose
        worker has had more than its fair share. Evening out at the start of sessions costs the least: nothing that is
        cached is left behind.
        """
        eligible = why_not == 0
        if not np.count_nonzero(eligible):
            return None
        terms = cost_terms(snapshot, query, self.decode_weight)
        costs = np.where(eligible, terms.cost_ms, np.inf)
        if not query.session_key:
            return Choice(cheapest(costs, snapshot, query.request_key), "lowest cost", terms)
        best = costs.min()
        known = query.bindings_known and query.bound >= 0
        bearable = known and costs[query.bound] - _kept_ms(snapshot, query) <= KEEP_FACTOR * best + KEEP_MS
        if bearable and not self._too_much(snapshot, query, terms):
            return Choice(query.bound, "session kept", terms)
        near = costs <= EVEN_FACTOR * best + EVEN_MS
        if not query.bindings_known:
            affordable = np.flatnonzero(near)
            scores = rendezvous(snapshot.identities[affordable], query.session_key)
            return Choice(int(affordable[scores.argmax()]), "session hashed", terms)
        idlest = near & (snapshot.share <= snapshot.share[near].min() + SAME_SHARE)
        index = cheapest(np.where(idlest, costs, np.inf), snapshot, query.request_key)
        if index == query.bound:
            return Choice(index, "session kept", terms)
        if query.bound < 0:
            return Choice(index, "session bound", terms)
        return Choice(index, "session evened out" if bearable else "session rebound", terms)

    def _too_much(self, snapshot: Snapshot, query: Query, terms: Terms) -> bool:
        """Whether the bound worker has had clearly more than its share: by more than a few requests like this one."""
        own = query.prompt_tokens - terms.matched_tokens[query.bound] + self.decode_weight * _output(query)
        return bool(snapshot.share[query.bound] > FAIR_SHARE and snapshot.excess[query.bound] > FAIR_REQUESTS * own)


def _kept_ms(snapshot: Snapshot, query: Query) -> float:
    """What a session leaves behind by moving that the costs do not know of.

    When nobody could say what is cached where, its worker is taken to have all of its prompt.
    """
    if query.matched_tokens is not None:
        return 0.0
    return float(query.prompt_tokens / snapshot.speeds.prefill_rate[query.bound] * 1000.0)


def _output(query: Query) -> int:
    return min(query.max_tokens or MAX_COUNTED_OUTPUT, MAX_COUNTED_OUTPUT)
