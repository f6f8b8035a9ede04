"""The running requests' tokens and block tables by slot, on every rank; only plans change them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.protocol.plan_codec import AdmissionView, PlanView

Ints = NDArray[np.int64]


class MalformedPlanError(ValueError):
    """A plan refers to tokens, blocks or slots that do not exist; the message names the slot."""


class SlotTable:
    """Arrays indexed by slot."""

    def __init__(self, max_running: int, max_model_len: int, block_tokens: int, n_blocks: int) -> None:
        """`n_blocks` 0: nothing is cached, and no position needs a block."""
        self.max_running, self.max_model_len = max_running, max_model_len
        self.block_tokens, self.n_blocks = block_tokens, n_blocks
        max_blocks = -(-max_model_len // block_tokens)
        # One more than the context: a full context still draws a token.
        self.token_ids = np.zeros((max_running, max_model_len + 1), np.int32)
        self.n_known = np.zeros(max_running, np.int64)
        self.n_prompt = np.zeros(max_running, np.int64)
        self.block_tables = np.zeros((max_running, max_blocks), np.int64)  # 0 is the null block
        self.adapters = np.full(max_running, -1, np.int64)  # slots of adapters
        self.attention = np.zeros((max_running, 3), np.int64)  # sinks, window, pages of decodes; all 0: dense
        self.n_held = np.zeros(max_running, np.int64)  # blocks in the table
        self.second_from = np.full(max_running, max_model_len + 1)  # position of the second text; beyond all: none

    def release(self, slots: NDArray[np.int32]) -> None:
        """Clear the slots of ended requests."""
        self._require_slots(slots)
        self.n_known[slots] = 0
        self.n_held[slots] = 0

    def admit(self, admission: AdmissionView) -> None:
        """Give a slot to a request with its known tokens."""
        slot, n_known = admission.slot, len(admission.token_ids)
        self._require_slots(np.array([slot]))
        if not 1 <= n_known <= self.max_model_len:
            raise MalformedPlanError(f"slot {slot} is admitted with {n_known} tokens; 1 to {self.max_model_len} fit")
        if not 1 <= admission.n_prompt <= n_known:
            raise MalformedPlanError(f"slot {slot}: n_prompt {admission.n_prompt} of {n_known} known tokens")
        self.token_ids[slot, :n_known] = admission.token_ids
        self.n_known[slot] = n_known
        self.n_prompt[slot] = admission.n_prompt
        self.adapters[slot] = admission.adapter
        attention = admission.sampling.attention
        self.attention[slot] = (attention.sinks, attention.window, attention.pages)
        self.n_held[slot] = 0
        self.second_from[slot] = admission.second_from or len(self.token_ids[slot])

    def extend(self, plan: PlanView) -> None:
        """Append the chunks' new blocks to their slots' block tables, and their proposals to the known tokens."""
        self._require_slots(plan.slots)
        if len(plan.slots) > 1 and np.bincount(plan.slots).max() > 1:
            raise MalformedPlanError(f"a slot has two chunks in step {plan.step}: {plan.slots.tolist()}")
        if len(plan.proposals):
            self._propose(plan)
        if not len(plan.new_blocks):
            return
        if plan.new_blocks.min() < 1 or plan.new_blocks.max() > self.n_blocks:
            raise MalformedPlanError(f"a new block is outside 1 to {self.n_blocks}: {plan.new_blocks.tolist()}")
        counts = plan.block_counts
        held = self.n_held[plan.slots]
        if (held + counts).max() > self.block_tables.shape[1]:
            slot = int(plan.slots[np.argmax(held + counts)])
            raise MalformedPlanError(f"slot {slot} holds more blocks than {self.max_model_len} tokens need")
        first = np.cumsum(counts) - counts  # each chunk's first index in new_blocks
        column = np.arange(len(plan.new_blocks)) + np.repeat(held - first, counts)
        self.block_tables[np.repeat(plan.slots, counts), column] = plan.new_blocks
        self.n_held[plan.slots] += counts

    def _propose(self, plan: PlanView) -> None:
        """Take the proposals for known tokens until the step has drawn, which keeps some and forgets the others."""
        counts = plan.proposal_counts
        chosen = np.flatnonzero(counts)
        slots, counts = plan.slots[chosen], counts[chosen]
        if (plan.n_tokens[chosen] != counts + 1).any() or (plan.starts[chosen] != self.n_known[slots] - 1).any():
            raise MalformedPlanError(f"step {plan.step}: proposals that do not follow the last known token")
        if (self.n_known[slots] + counts).max() > self.max_model_len:
            raise MalformedPlanError(f"step {plan.step}: proposals beyond position {self.max_model_len}")
        first = np.cumsum(counts) - counts
        positions = np.arange(len(plan.proposals)) + np.repeat(self.n_known[slots] - first, counts)
        self.token_ids[np.repeat(slots, counts), positions] = plan.proposals
        self.n_known[slots] += counts

    def token_types(self, slots: Ints, positions: Ints) -> Ints | None:
        """Return 1 for positions in the second of two texts, else 0; None if there are no second texts."""
        types = positions >= self.second_from[slots]
        return types.astype(np.int64) if types.any() else None

    def append(self, slots: Ints, positions: Ints, token_ids: Ints) -> None:
        """Write drawn tokens, or references to tokens that are still on the device, at their positions."""
        self.token_ids[slots, positions] = token_ids
        self.n_known[slots] = positions + 1

    def settle(self, slots: Ints, positions: Ints, token_ids: Ints) -> None:
        """Replace references by tokens. No slot changes hands while a step that draws for it is in flight."""
        self.token_ids[slots, positions] = token_ids

    def require_computable(self, plan: PlanView, ends: NDArray[np.int32]) -> None:
        """Raise MalformedPlanError unless the slots have the chunks' tokens and blocks."""
        most = self.n_known[plan.slots]
        if self.n_blocks:
            most = np.minimum(most, self.n_held[plan.slots] * self.block_tokens)
        if plan.n_tokens.min() >= 1 and plan.starts.min() >= 0 and (ends <= most).all():
            return  # the usual case; finding the faulty slot takes longer
        self._require(plan, (plan.n_tokens >= 1) & (plan.starts >= 0), "an empty or negative range", ends)
        self._require(plan, ends <= self.n_known[plan.slots], "a token that is not known", ends)
        blocks = -(-ends // self.block_tokens)
        self._require(plan, blocks <= self.n_held[plan.slots], "a position without a block", ends)

    def _require(self, plan: PlanView, holds: NDArray[np.bool_], what: str, ends: NDArray[np.int32]) -> None:
        if holds.all():
            return
        at = int(np.argmin(holds))
        slot = int(plan.slots[at])
        raise MalformedPlanError(
            f"step {plan.step}: slot {slot}'s chunk [{plan.starts[at]}, {ends[at]}) covers {what} "
            f"(known tokens {self.n_known[slot]}, blocks {self.n_held[slot]} of {self.block_tokens})"
        )

    def _require_slots(self, slots: NDArray[np.int32]) -> None:
        if len(slots) and (slots.min() < 0 or slots.max() >= self.max_running):
            raise MalformedPlanError(f"slots {slots.tolist()} are not all within 0 to {self.max_running - 1}")
