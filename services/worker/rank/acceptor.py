"""Draws the tokens of a step's rows, and decides which proposals stand.

A proposal stands if the draw at the row before it gives the same token. That draw is the one which the request would
have made without proposals: it depends on the request's seed, the position and the tokens so far, and on no other row.
So proposals change how many tokens a step yields, but no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.compute.sampling.sampler import Draws, Sampler
from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.plan import SlotResult
from services.worker.rank.batching import DrawingRows
from services.worker.rank.slot_table import SlotTable

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Draft:
    """A slot's rows from `first` to `end`, and what was drawn at those up to `row`, besides tokens."""

    slot: int
    first: int
    row: int  # the newest that is drawn
    end: int  # after the last
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: str = ""

    def stands(self, token: int, known: NDArray[np.int32]) -> bool:
        """Whether the proposal after the newest row is `token`, so that the next row may be drawn."""
        return self.row + 1 < self.end and not self.failure and token == known[self.row]


class Acceptor:
    """Draws for every slot of a step, and puts the tokens into the slot table.

    It does not know where a text ends: the server drops the tokens behind an end token, as it drops later steps. After
    `NO_TOKEN` the server ends the request; the table gets token 0, for the steps in flight.
    """

    def __init__(self, sampler: Sampler, table: SlotTable, device: torch.device, *, forces: bool = False) -> None:
        """`forces`: the server wants to know the tokens that grammars force next."""
        self._sampler, self._table, self._device, self._forces = sampler, table, device, forces

    def draw(self, logits: Tensor, drawing: DrawingRows) -> tuple[SlotResult, ...]:
        """Draw for rows with `logits` [n, vocab_local], which may be overwritten."""
        others = drawing.slots[1:] != drawing.slots[:-1]
        if others.all():
            draws = self._sampler.draw(logits, drawing.slots, drawing.positions)
            self._table.append(drawing.slots, drawing.positions, np.maximum(draws.token_ids, 0))
            return self.results(drawing.slots, draws)
        return self._verify(logits, drawing, np.flatnonzero(np.concatenate(([True], others))))

    def results(self, slots: Ints, draws: Draws) -> tuple[SlotResult, ...]:
        """Return the records of a step in which each slot drew one token."""
        token_ids = [(token,) for token in draws.token_ids.tolist()]
        results = list(map(SlotResult, slots.tolist(), token_ids))
        if draws.logprobs or draws.failures or (self._forces and self._sampler.constrains(slots)):
            results = [self._complete(result, draws) for result in results]
        return tuple(results)

    def _complete(self, result: SlotResult, draws: Draws) -> SlotResult:
        slot = result.slot
        if (failure := draws.failures.get(slot)) is not None:
            return SlotResult(slot, failure=failure)
        logprobs = (draws.logprobs[slot],) if slot in draws.logprobs else ()
        return result._replace(logprobs=logprobs, forced=self._forced(slot))

    def _forced(self, slot: int) -> tuple[int, ...]:
        return self._sampler.forced(slot) if self._forces else ()

    def _verify(self, logits: Tensor, drawing: DrawingRows, first: Ints) -> tuple[SlotResult, ...]:
        """Draw in rounds until each slot has a token that differs from its proposal.

        Draws that need the request's history (see `Sampler.needs_history`) are made one row of a slot at a time, so
        that the sampler knows each token before it draws the next one. Other rows are drawn in the first round.
        """
        known = self._table.token_ids[drawing.slots, drawing.positions]  # the proposals; after a last row anything
        tokens = np.empty(len(drawing.slots), np.int64)
        ends = [*first[1:].tolist(), len(tokens)]
        drafts = [
            _Draft(slot, start, start, end)
            for slot, start, end in zip(drawing.slots[first].tolist(), first.tolist(), ends, strict=True)
        ]
        stepwise = self._sampler.needs_history(drawing.slots)
        at_once = ~stepwise
        at_once[first] = True
        rows, going = np.flatnonzero(at_once), drafts
        while len(rows):
            draws = self._draw(logits, drawing, rows)
            tokens[rows] = draws.token_ids
            following = []
            for draft in going:
                self._take(draft, draws)
                while draft.stands(int(tokens[draft.row]), known):
                    draft.row += 1
                    if stepwise[draft.row]:
                        following.append(draft)
                        break
            going = following
            rows = np.array([draft.row for draft in going], np.int64)
        last = np.array([draft.row for draft in drafts], np.int64)
        self._table.append(drawing.slots[last], drawing.positions[last], np.maximum(tokens[last], 0))
        return tuple(self._result(draft, tokens) for draft in drafts)

    def _draw(self, logits: Tensor, drawing: DrawingRows, rows: Ints) -> Draws:
        part = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(self._device)]
        return self._sampler.draw(part, drawing.slots[rows], drawing.positions[rows])

    def _take(self, draft: _Draft, draws: Draws) -> None:
        if draft.slot in draws.logprobs:
            draft.logprobs.append(draws.logprobs[draft.slot])
        draft.failure = draws.failures.get(draft.slot, "")

    def _result(self, draft: _Draft, tokens: Ints) -> SlotResult:
        n = draft.row + (not draft.failure)
        forced = () if draft.failure else self._forced(draft.slot)
        token_ids, logprobs = tuple(tokens[draft.first : n].tolist()), tuple(draft.logprobs[: n - draft.first])
        return SlotResult(draft.slot, token_ids, logprobs, failure=draft.failure, forced=forced)
