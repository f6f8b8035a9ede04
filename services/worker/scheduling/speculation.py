"""Which running requests carry proposals in a step, and how many: those that raise the tokens per second.

A proposal adds seconds to a step, and a token with a probability that is learnt from what became of others like it.
Proposals are taken in the order of their probabilities, while a token of theirs costs less than the step's tokens do.
So drafts end by themselves where they do not pay: in large batches, and for texts that drafters guess badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import NamedTuple

from services.worker.drafting.draft import PREDICTION, Draft, Drafter
from services.worker.drafting.drafts import Drafts, Evidence
from services.worker.drafting.forced import ForcedTokens
from services.worker.drafting.prediction import PredictionLookup
from services.worker.drafting.prompt_lookup import PromptLookup
from services.worker.drafting.suffix import SuffixLookup, TenantTexts
from services.worker.engine.output import Output
from services.worker.engine.state import EngineCounters
from services.worker.scheduling.block_pool import BlockPool
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.fairness import PREFILL_COST, TenantLedger
from services.worker.scheduling.request import Request
from services.worker.scheduling.step_builder import StepBuilder

MOST_PROPOSALS = 31  # a request's in a step
# `bench.speculation` shows gains up to here; with many more, the search alone costs: some 8 us a request and step.
_MOST_RUNNING = 16
# After a search that finds nothing, there is none for a step for each so many requests: it would only cost.
_REQUESTS_A_REST = 4
_OWN_WEIGHT = 6.0  # evidence of other requests counts as much as this many of the request's own proposals
_PRIOR_WEIGHT = 4.0
_LEAST_ANSWER = 16  # tokens; a shorter answer is not remembered
_LEAST_PRIOR = {PREDICTION: 0.7}  # the client expects it


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a step of the running decodes, and what proposals add to them."""

    decode_s: float = 0.0  # without proposals; 0: not measured, so that nothing is proposed
    proposal_s: float = 0.0  # each
    wait_s: float = 0.0005  # the ranks wait for the plan, because the step cannot be planned ahead


class _Candidate(NamedTuple):
    """The `n`th token of a draft. Candidates order by their gain, the largest first."""

    negative_gain: float
    request: int  # its index
    n: int
    certainty: float  # probability that the tokens in flight are the draft's first ones, else it is not computed
    probability: float  # that a proposal stands, if those before it do
    draft: Draft

    @property
    def gain(self) -> float:
        """The tokens that it adds to the step, on average, if it is computed: the probability that it stands."""
        return -self.negative_gain

    def following(self) -> _Candidate:
        """The draft's next token."""
        return self._replace(negative_gain=self.negative_gain * self.probability, n=self.n + 1)


class Speculator:
    """Chooses proposals, and learns from what became of them."""

    def __init__(self, config: SchedulerConfig, counters: EngineCounters) -> None:
        self.cost = DraftCost()  # the engine sets it from the measured step times
        self.most_running = _MOST_RUNNING  # with more running requests, nothing is proposed
        self._config, self._counters = config, counters
        self._texts = TenantTexts()
        self._evidence: dict[tuple[str, int], Evidence] = {}  # by drafter and size of the match
        self._rest = 0  # calls without a search

    def open(self, request: Request) -> Drafts | None:
        """The drafters of a new request; None: nothing is ever proposed for it."""
        if not self._config.speculation or request.embed or request.trial_tokens:
            return None
        drafters: list[Drafter] = [PromptLookup(), SuffixLookup(self._texts, _scope(request))]
        if request.prediction_ids:
            drafters.append(PredictionLookup(request.prediction_ids, request.n_prompt))
        forced = ForcedTokens() if request.sampling.grammar else None
        return Drafts([*drafters, forced] if forced else drafters, forced=forced)

    def close(self, request: Request) -> None:
        """Let the tenant's next requests find drafts in the answer of a request that ends."""
        if request.drafts is not None and request.n_generated >= _LEAST_ANSWER:
            self._texts.add(_scope(request), request.token_ids[request.n_prompt :])

    def choose(self, running: Sequence[Request]) -> dict[Request, Draft]:
        """Proposals for a step of decodes; none if a prompt is being computed, which needs the rows.

        While a step is in flight they tell whether to wait for its result: they follow from the tokens that it draws.
        """
        cost, n = self.cost, len(running)
        if not cost.decode_s or not 0 < n <= self.most_running or cost.proposal_s * n >= cost.decode_s + cost.wait_s:
            return {}  # not even a sure token would pay
        in_flight = [request.n_planned + 1 - len(request.token_ids) for request in running]
        if min(in_flight) < 0:
            return {}
        if self._rest:
            self._rest -= 1
            return {}
        chosen = self._best(running, self._candidates(running, in_flight))
        self._rest = 0 if chosen else n // _REQUESTS_A_REST
        return chosen

    def _best(self, running: Sequence[Request], heap: list[_Candidate]) -> dict[Request, Draft]:
        """The proposals with which the step yields the most tokens per second; none if it does so without any."""
        cost, n, last = self.cost, len(running), dict[int, _Candidate]()
        tokens, seconds, rows = float(n), cost.decode_s + cost.wait_s, n
        while heap and rows < self._config.max_running:
            best = heap[0]
            if best.gain * seconds <= cost.proposal_s * tokens:
                break
            tokens, seconds = tokens + best.certainty * best.gain, seconds + best.certainty * cost.proposal_s
            rows += 1
            last[best.request] = best
            if best.n < len(best.draft.token_ids):
                heapreplace(heap, best.following())
            else:
                heappop(heap)
        if tokens * cost.decode_s <= n * seconds:
            return {}
        return {
            running[best.request]: best.draft._replace(token_ids=best.draft.token_ids[: best.n])
            for best in last.values()
        }

    def _candidates(self, running: Sequence[Request], in_flight: Sequence[int]) -> list[_Candidate]:
        """A heap of the first proposals of the requests' likeliest drafts that go on after the tokens in flight."""
        heap = []
        for index, (request, n) in enumerate(zip(running, in_flight, strict=True)):
            drafts = [
                (self._probability(request, draft), draft)
                for draft in self._drafts(request)
                if len(draft.token_ids) > n
            ]
            if request.drafts is not None and drafts:
                probability, draft = max(drafts, key=itemgetter(0))
                request.drafts.untried = draft
                heap.append(_Candidate(-probability, index, n + 1, probability**n, probability, draft))
        heapify(heap)
        return heap

    def add(
        self, builder: StepBuilder, request: Request, draft: Draft, new_blocks: tuple[int, ...], pool: BlockPool
    ) -> None:
        """Plan a decode and as many of its proposals as there are blocks for without taking those that others need."""
        n, start, size = len(draft.token_ids), request.n_planned, self._config.block_tokens
        wanted = -(-(start + 1 + n) // size) - len(request.blocks)
        if wanted > 0:
            more = pool.allocate(min(wanted, max(0, pool.available - self._config.max_running)))
            request.blocks += more
            new_blocks += tuple(more)
            n = min(n, len(request.blocks) * size - start - 1)
        proposals = tuple(draft.token_ids[:n])
        if proposals:
            assert request.drafts is not None
            request.drafts.carried, request.drafts.untried = draft._replace(token_ids=proposals), None
        builder.add(request, 1 + n, new_blocks, proposals=proposals)

    def returned(self, request: Request, output: Output, ledger: TenantLedger) -> Output:
        """Learn what became of a request's proposals; its tenant pays for the rows of those that fell."""
        drafts = request.drafts
        assert drafts is not None
        draft, drafts.carried = drafts.carried, None
        assert draft is not None
        n_proposed, n_accepted = len(draft.token_ids), max(0, len(output.token_ids) - 1)
        n_rejected = n_proposed - n_accepted
        for evidence in (self._of(draft), drafts.own.setdefault(draft.drafter, Evidence())):
            evidence.add(n_proposed, n_accepted)
        self._counters.proposed_tokens[draft.drafter] += n_proposed
        self._counters.accepted_tokens[draft.drafter] += n_accepted
        ledger.charge(request.tenant, PREFILL_COST * n_rejected)
        output = output._replace(proposed=n_proposed)
        if draft.drafter != PREDICTION:
            return output
        return output._replace(accepted_prediction=n_accepted, rejected_prediction=n_rejected)

    def _drafts(self, request: Request) -> Sequence[Draft]:
        drafts, n_tokens = request.drafts, len(request.token_ids)
        most = min(MOST_PROPOSALS, request.limit - n_tokens - 1)
        if drafts is None or most < 1:
            return ()
        if drafts.untried is not None and n_tokens > drafts.seen:
            self._learn_untried(drafts, drafts.untried, request.token_ids[drafts.seen])
        return drafts.after(request.token_ids, most)

    def _learn_untried(self, drafts: Drafts, draft: Draft, token: int) -> None:
        """Learn from the `token` that was drawn where a draft began that no step carried."""
        drafts.untried = None
        self._of(draft).add(1, int(token == draft.token_ids[0]))
        if (own := drafts.own.get(draft.drafter)) is not None:
            own.add(0, 0)  # it fades, so that the drafter is tried again where the text has changed

    def _of(self, draft: Draft) -> Evidence:
        return self._evidence.setdefault((draft.drafter, draft.match.bit_length()), Evidence())

    def _probability(self, request: Request, draft: Draft) -> float:
        """Probability that a proposal stands, if those before it do."""
        assert request.drafts is not None
        prior = max(_LEAST_PRIOR.get(draft.drafter, 0.0), min(0.9, 0.15 * draft.match.bit_length()))
        general = self._of(draft).probability(prior, _PRIOR_WEIGHT)
        own = request.drafts.own.get(draft.drafter)
        return general if own is None else own.probability(general, _OWN_WEIGHT)


def _scope(request: Request) -> str:
    """The tenant, the salt and the adapter: requests that share all three may find drafts in each other's answers."""
    return f"{request.tenant}/{request.chain_root.hex()}"
