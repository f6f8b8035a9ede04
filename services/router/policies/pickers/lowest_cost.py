"""The cheapest candidate."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Amount, Candidates, Factor, Pick, Picker


class LowestCost(Picker):
    """The lowest cost; of equal costs the fewest requests; of these one by the request's hash, as on every router.

    Close costs count as equal, since the states behind them are slightly out of date. A strict minimum would send all
    requests between two states to one worker. One request more hardly changes the cost of a decode, but its worker
    computes prompts and decodes in turns, so an idle worker is better.
    """

    type: Literal["lowest_cost"] = "lowest_cost"
    factor: Factor = 1.02
    """Costs up to this many times the lowest, ..."""
    ms: Amount = 1.0
    """... and this much beyond that, count as equal to it."""

    uses_costs: ClassVar[bool] = True

    def pick(self, candidates: Candidates) -> Pick:
        """One of the tied workers."""
        ties = (candidates.costs <= candidates.cheapest() * self.factor + self.ms).nonzero()[0]
        if len(ties) > 1:  # a single one needs no comparison, which would take as long as the rest
            load = candidates.snapshot.load[ties]
            ties = ties[load == load[load.argmin()]]
        return Pick(int(ties[candidates.query.request_key % len(ties)]), "lowest cost")
