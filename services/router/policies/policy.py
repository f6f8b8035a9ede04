"""A policy: scorers give each worker a cost, filters narrow the candidates down, a picker takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.router.estimates import estimate, expected_output
from services.router.policies.base import Candidates, Filter, Pick, Picker, Scorer
from services.router.policies.filters.keep_session import KEPT, KeepSession
from services.router.policies.scorers.adapter_load import AdapterLoad
from services.router.policies.scorers.decode_time import DecodeTime
from services.router.policies.scorers.time_to_first_token import TimeToFirstToken
from services.router.snapshot import ChosenEstimates, Decision, Estimates, Floats, Query, Snapshot


class Policy:
    """Chooses a worker: a pure function of its arguments. It has at least one scorer."""

    def __init__(self, name: str, filters: tuple[Filter, ...], scorers: tuple[Scorer, ...], picker: Picker) -> None:
        self.name = name
        deciders = (*filters, picker)
        # If no filter or picker reads costs, scorers serve `Explain` alone, and need no look-ups.
        parts = (*deciders, *scorers) if any(part.uses_costs for part in deciders) else deciders
        self.uses_prefixes = any(part.uses_prefixes for part in parts)
        self.uses_sessions = any(part.uses_sessions for part in parts)
        self._decode_weight = sum(scorer.weight for scorer in scorers if isinstance(scorer, DecodeTime))
        self._first_token_weight = sum(scorer.weight for scorer in scorers if isinstance(scorer, TimeToFirstToken))
        first = filters[0] if filters else None
        bounded = all(isinstance(scorer, TimeToFirstToken | DecodeTime | AdapterLoad) for scorer in scorers)
        self._keeping = first if isinstance(first, KeepSession) and not first.busy_only and bounded else None
        self._filters = filters
        self._filters_without_session = tuple(part for part in filters if not part.sessions_only)
        self._first, *self._others = (_Weighted(scorer.score, scorer.weight, scorer.scale) for scorer in scorers)
        self._picker = picker

    def choose(self, snapshot: Snapshot, query: Query, why_not: NDArray[np.uint8]) -> Decision | None:
        """The worker for `query` among those with ``why_not == 0``; None when there is none."""
        n_ineligible = np.count_nonzero(why_not)
        if n_ineligible == len(why_not):
            return None
        estimates, costs = self.weigh(snapshot, query)
        eligible = why_not == 0 if n_ineligible else None
        masked = costs if eligible is None else np.where(eligible, costs, np.inf)
        worker, reason = self._pick(Candidates(snapshot, query, masked, eligible, self._decode_weight))
        return Decision(worker, reason, estimates.at(worker, costs))

    def keep(self, snapshot: Snapshot, query: Query, matched: float | None) -> Decision | None:
        """The decision of `choose` for a session whose worker is obviously cheap enough to stay; None: ask `choose`.

        `matched` is what the worker has cached, and no worker more; None if it is not known. The others' costs are only
        needed to find the cheapest one. Its answer takes at least the fastest decode steps without other requests. If
        the session's worker is cheap even in comparison with these, no vector operation is needed.
        """
        part, speeds, bound = self._keeping, snapshot.speeds, query.bound
        needed = query.prompt_tokens + max(query.max_tokens, 1)
        if part is None or bound < 0 or snapshot.why_not[bound] or needed > speeds.smallest_limit:
            return None
        cached, token_ms, fixed = matched or 0.0, float(speeds.token_ms[bound]), speeds.batch_doubles + 1.0
        ttft_ms = (float(snapshot.queued_tokens[bound]) + max(query.prompt_tokens - cached, 1.0)) * token_ms
        itl_ms = (float(snapshot.load[bound]) + fixed) * float(speeds.batch_ms[bound])
        decode = self._decode_weight * expected_output(query)
        cost_ms = ttft_ms * self._first_token_weight + itl_ms * decode
        presumed_ms = query.prompt_tokens * token_ms if matched is None else 0.0
        if not part.bears(cost_ms - presumed_ms, fixed * speeds.least_batch_ms * decode):
            return None
        if part.too_much(snapshot, bound, query.prompt_tokens - cached + decode):
            return None
        return Decision(bound, KEPT, ChosenEstimates(cached, ttft_ms, itl_ms, cost_ms))

    def weigh(self, snapshot: Snapshot, query: Query) -> tuple[Estimates, Floats]:
        """Estimates and costs of every worker, eligible or not."""
        estimates = estimate(snapshot, query)
        costs = self._first.costs(snapshot, query, estimates)
        for scorer in self._others:
            more = scorer.costs(snapshot, query, estimates)
            costs = more if costs is None else costs if more is None else costs + more
        return estimates, np.zeros(len(snapshot.worker_ids)) if costs is None else costs

    def _pick(self, candidates: Candidates) -> Pick:
        query, busy = candidates.query, candidates.snapshot.busy
        for part in self._filters if query.session_key else self._filters_without_session:
            if part.busy_only and not busy:
                continue
            narrowed = part.narrow(candidates)
            if isinstance(narrowed, Pick):
                return narrowed
            if narrowed is not None:
                candidates.narrow(narrowed)
        pick = self._picker.pick(candidates)
        if not (query.session_key and self.uses_sessions and query.bindings_known):
            return pick
        if query.bound < 0:
            return Pick(pick.worker, "session bound")
        return Pick(pick.worker, KEPT if pick.worker == query.bound else candidates.departure)


class _Weighted(NamedTuple):
    """A scorer's fields as a tuple: looking them up on a pydantic model takes as long as some of the products."""

    score: Callable[[Snapshot, Query, Estimates], Floats | None]
    weight: float
    scale: Callable[[Query], float]

    def costs(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats | None:
        weight = self.weight * self.scale(query)
        score = self.score(snapshot, query, estimates)
        return score if weight == 1.0 or score is None else score * weight
