"""Ranks without a model: they keep the slot state that real ranks keep and draw a function of all tokens so far.

A plan that the real ranks could not execute (a chunk without blocks, a stale position) fails here. The KV of a
position is the hash of the prefix that ends there, so a block that is shared or reused wrongly gives other
tokens, just as wrong KV would. The state of a slot is also that hash: it must be the one before a chunk's first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.protocol.plan import Admission, Chunk, Save, SlotResult, StepPlan, StepResult

VOCAB = 97


def next_token(state: int, sampling: Sampling) -> int:
    return crc32(state.to_bytes(8, "little") + sampling.seed.to_bytes(8, "little")) % VOCAB


def extend(state: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), state)


def generate(prompt: list[int], n: int, sampling: Sampling) -> list[int]:
    """The answer of one request alone."""
    tokens = list(prompt)
    state = 0
    for token in tokens:
        state = extend(state, token)
    for _ in range(n):
        tokens.append(next_token(state, sampling))
        if tokens[-1] in sampling.stop_token_ids:
            break
        state = extend(state, tokens[-1])
    return tokens[len(prompt) :]


@dataclass
class _Slot:
    admission: Admission
    tokens: list[int]
    table: list[int] = field(default_factory=list)


class FakeRanks:
    def __init__(self, n_blocks: int, block_tokens: int, max_running: int, *, has_state: bool = False) -> None:
        self.has_state = has_state
        self.kv = [[0] * block_tokens for _ in range(n_blocks + 1)]
        self.block_tokens = block_tokens
        self.max_running = max_running
        self.slots: dict[int, _Slot] = {}
        self.rows = 0
        self.states: dict[int, int] = {}  # by row: slots, then snapshots
        self.saves: dict[int, list[Save]] = {}  # those of the step, by slot

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.released:
            del self.slots[slot]
        for admission in plan.admissions:
            assert admission.slot not in self.slots
            assert 0 <= admission.slot < self.max_running
            self.slots[admission.slot] = _Slot(admission, list(admission.token_ids))
            if admission.restore >= 0:
                assert admission.restore >= self.max_running
                self.states[admission.slot] = self.states[admission.restore]
        self.saves = {}
        for save in plan.saves:
            assert save.row >= self.max_running
            self.saves.setdefault(save.slot, []).append(save)
        assert self.saves.keys() <= {chunk.slot for chunk in plan.chunks}
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        return StepResult(plan.step, tuple(self._compute(chunk) for chunk in plan.chunks))

    def _compute(self, chunk: Chunk) -> SlotResult:
        slot = self.slots[chunk.slot]
        slot.table += chunk.new_blocks
        end = chunk.start + chunk.n_tokens
        assert chunk.n_tokens > 0
        if chunk.proposals:
            assert chunk.draws
            assert chunk.n_tokens == 1 + len(chunk.proposals)
            assert chunk.start == len(slot.tokens) - 1, "proposals that do not follow the last token"
            slot.tokens += chunk.proposals
        assert end <= len(slot.tokens), "the rank does not know these tokens"
        assert end <= len(slot.table) * self.block_tokens, "no block for these positions"
        state = self._kv(slot, chunk.start - 1) if chunk.start else 0
        if self.has_state and chunk.start:
            assert self.states[chunk.slot] == state, "the state of another prefix"
        for position in range(chunk.start, end):
            state = extend(state, slot.tokens[position])
            for save in self.saves.get(chunk.slot, ()):
                if save.position == position + 1:
                    self.states[save.row] = state
            self.kv[slot.table[position // self.block_tokens]][position % self.block_tokens] = state
        assert all(chunk.start < save.position <= end for save in self.saves.get(chunk.slot, ()))
        self.states[chunk.slot] = state
        self.rows += chunk.n_tokens
        if not chunk.draws:
            return SlotResult(chunk.slot)
        assert end == len(slot.tokens)
        self._verify(slot, end)
        if slot.admission.embed:
            return SlotResult(chunk.slot, pooled=(float(slot.tokens[0]),))
        return SlotResult(chunk.slot, self._accept(slot, chunk))

    def _accept(self, slot: _Slot, chunk: Chunk) -> tuple[int, ...]:
        """The drawn tokens: the proposals that a draw repeats, and the draw after them."""
        del slot.tokens[chunk.start + chunk.n_tokens - len(chunk.proposals) :]
        first = len(slot.tokens)
        for proposal in (*chunk.proposals, None):
            token = next_token(self._kv(slot, len(slot.tokens) - 1), slot.admission.sampling)
            slot.tokens.append(token)
            if token != proposal:
                break
        return tuple(slot.tokens[first:])

    def _kv(self, slot: _Slot, position: int) -> int:
        return self.kv[slot.table[position // self.block_tokens]][position % self.block_tokens]

    def _verify(self, slot: _Slot, end: int) -> None:
        """Every position that attention would read holds the KV of this very prefix."""
        state = 0
        for position in range(end):
            state = extend(state, slot.tokens[position])
            assert self._kv(slot, position) == state, f"position {position} holds the KV of another prefix"
