"""The default policy: the worker where the request ends soonest, sticky as long as that is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.router.pulls import worthwhile_pulls
from services.router.snapshot import Choice, Floats, Query, Snapshot, Terms, matched_at, rendezvous

# Most answers are shorter than their limit; beyond this the limit says nothing.
MAX_COUNTED_OUTPUT = 256

# What staying with its worker may cost a session beyond the cheapest one. Wide, since costs swing with every prompt
# that arrives somewhere, and who moves has to be computed again: a queue makes sessions move, and moves make queues.
KEEP_FACTOR, KEEP_MS = 2.0, 100.0
# What evening out may cost: all that is asked of a worker that is no session's own.
EVEN_FACTOR, EVEN_MS = 1.25, 50.0
# A worker that has had more than this share of the recent work, and as many requests more than its share, gives
# sessions away. New ones even out most: in the simulation of test_conversations.py 3 turns in a hundred move.
FAIR_SHARE, FAIR_REQUESTS = 1.05, 4
# Shares this close are equal.
SAME_SHARE = 0.01
# Costs this close are equal: they differ by less than the state's age, and a strict minimum would send everything
# that arrives between two states to one worker.
TIE_FACTOR, TIE_MS = 1.02, 1.0


def cost_terms(snapshot: Snapshot, query: Query, decode_weight: float) -> Terms:
    """Time to first token and a share of the decode time, if the request went to each worker."""
    nothing = np.zeros(len(snapshot.worker_ids))
    matched = query.matched_tokens if query.matched_tokens is not None else nothing
    # At least one token is computed, however much is cached.
    own = np.maximum(query.prompt_tokens - matched, 1.0)
    ttft = (snapshot.queued_tokens + own) * snapshot.speeds.token_ms
    pulled, source = nothing, -1
    if (pulls := worthwhile_pulls(snapshot, query)) is not None:
        pulled, source, ttft = pulls.tokens, pulls.source, ttft - pulls.saved_ms
    itl = (snapshot.load + (snapshot.speeds.batch_doubles + 1.0)) * snapshot.speeds.batch_ms
    return Terms(matched, pulled, source, ttft, itl, ttft + itl * (decode_weight * _output(query)))


def cheapest(costs: Floats, request_key: int) -> int:
    """The lowest cost; ties go to a worker that differs from request to request, but not between routers."""
    ties = np.flatnonzero(costs <= _lowest(costs) * TIE_FACTOR + TIE_MS)
    return int(ties[request_key % len(ties)])


def _lowest(costs: Floats) -> float:
    return float(costs[costs.argmin()])  # several times as fast as min()


@dataclass(frozen=True)
class CostPolicy:
    """Affinity and load in one currency: milliseconds."""

    decode_weight: float
    uses_prefixes: ClassVar[bool] = True
    uses_sessions: ClassVar[bool] = True

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Choice | None:
        """Keep the session's worker while it is bearable: at most twice the minimum plus 100 ms.

        A new session goes to the worker that has had the least of the recent work, of those that cost at most 1.25
        times the minimum plus 50 ms and have less than their share of the requests now, and so does one whose worker
        has had more than its fair share. Evening out at the start of sessions costs the least: nothing that is cached
        is left behind.
        """
        n_ineligible = np.count_nonzero(why_not)
        if n_ineligible == len(why_not):
            return None
        terms = cost_terms(snapshot, query, self.decode_weight)
        costs = np.where(why_not == 0, terms.cost_ms, np.inf) if n_ineligible else terms.cost_ms
        if not query.session_key:
            return Choice(cheapest(costs, query.request_key), "lowest cost", terms)
        best = _lowest(costs)
        known = query.bindings_known and query.bound >= 0
        bearable = known and costs[query.bound] - _kept_ms(snapshot, query) <= KEEP_FACTOR * best + KEEP_MS
        if bearable and not self._too_much(snapshot, query):
            return Choice(query.bound, "session kept", terms)
        near = costs <= EVEN_FACTOR * best + EVEN_MS  # among them all that tie with the cheapest
        if not query.bindings_known:
            affordable = np.flatnonzero(near)
            scores = rendezvous(snapshot.identities[affordable], query.session_key)
            return Choice(int(affordable[scores.argmax()]), "session hashed", terms)
        if snapshot.busy:
            if np.count_nonzero(spare := near & (snapshot.load_share < 1.0)):
                near = spare
            idlest = near & (snapshot.share <= snapshot.share[near].min() + SAME_SHARE)
            costs = np.where(idlest, costs, np.inf)
        index = cheapest(costs, query.request_key)
        if index == query.bound:
            return Choice(index, "session kept", terms)
        if query.bound < 0:
            return Choice(index, "session bound", terms)
        return Choice(index, "session evened out" if bearable else "session rebound", terms)

    def _too_much(self, snapshot: Snapshot, query: Query) -> bool:
        """Whether the bound worker has had clearly more than its share: by more than a few requests like this one.

        And has more now: what it has had weighs for half a minute, and all its sessions would leave it meanwhile.
        """
        share, load_share = snapshot.share[query.bound], snapshot.load_share[query.bound]
        if not snapshot.busy or share <= FAIR_SHARE or load_share <= 1.0:
            return False
        own = query.prompt_tokens - matched_at(query, query.bound) + self.decode_weight * _output(query)
        return bool(snapshot.excess[query.bound] > FAIR_REQUESTS * own)


def _kept_ms(snapshot: Snapshot, query: Query) -> float:
    """What a session leaves behind by moving that the costs do not know of.

    When nobody could say what is cached where, its worker is taken to have all of its prompt.
    """
    if query.matched_tokens is not None:
        return 0.0
    return float(query.prompt_tokens * snapshot.speeds.token_ms[query.bound])


def _output(query: Query) -> int:
    return min(query.max_tokens or MAX_COUNTED_OUTPUT, MAX_COUNTED_OUTPUT)
