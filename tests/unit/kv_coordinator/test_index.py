from __future__ import annotations

import functools
import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.kv_coordinator.index import BlockIndex, Slot

# A prefix tree over a few tokens; its nodes' hashes spread over all shards.
CHAINS = [
    tuple(tokens[:n]) for tokens in ((0, 0, 0, 0, 0, 0), (0, 0, 1, 0, 1), (0, 1, 1, 1), (1, 0)) for n in (6, 5, 4)
]


@functools.cache
def hash_of(prefix: tuple[int, ...]) -> int:
    return random.Random(repr(prefix)).getrandbits(64)


def chain_of(tokens: tuple[int, ...]) -> list[int]:
    return [hash_of(tokens[: n + 1]) for n in range(len(tokens))]


class IndexMachine(RuleBasedStateMachine):
    """Workers that evict leaves first, against a model that keeps every worker's blocks in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.slots: dict[str, Slot] = {}
        self.held: dict[str, set[tuple[int, ...]]] = {}
        self.sweeping = iter(())

    worker_ids = st.sampled_from("abcde")

    @rule(worker_id=worker_ids)
    def join_or_reset(self, worker_id: str) -> None:
        if worker_id in self.slots:
            self.index.close_slot(self.slots[worker_id])
        self.slots[worker_id] = self.index.open_slot(worker_id, "x")
        self.held[worker_id] = set()

    @rule(worker_id=worker_ids)
    def leave(self, worker_id: str) -> None:
        if worker_id in self.slots:
            self.index.close_slot(self.slots.pop(worker_id))
            del self.held[worker_id]

    @rule(worker_id=worker_ids, tokens=st.sampled_from(CHAINS))
    def store(self, worker_id: str, tokens: tuple[int, ...]) -> None:
        if worker_id in self.slots:
            self.index.store(self.slots[worker_id], chain_of(tokens))
            self.held[worker_id] |= {tokens[: n + 1] for n in range(len(tokens))}

    @rule(worker_id=worker_ids, data=st.data())
    def evict_leaves(self, worker_id: str, data: st.DataObject) -> None:
        held = self.held.get(worker_id, set())
        leaves = [p for p in held if not any(q[:-1] == p for q in held)]
        gone = data.draw(st.lists(st.sampled_from(leaves), unique=True)) if leaves else []
        if worker_id in self.slots:
            self.index.remove(self.slots[worker_id], [hash_of(p) for p in gone])
            held -= set(gone)

    @rule(slices=st.integers(1, 3))
    def sweep_a_little(self, slices: int) -> None:
        for _ in range(slices):
            if next(self.sweeping, "ended") == "ended":
                self.sweeping = self.index.sweep(0.0)
                return

    @precondition(lambda self: self.index.needs_sweep())
    @rule()
    def sweep_all(self) -> None:
        for _ in self.sweeping:
            pass
        for _ in self.index.sweep(1.0):
            pass
        assert self.index.blocks() == len(set().union(*self.held.values())) if self.held else not self.index.blocks()

    @invariant()
    def depths_are_exact(self) -> None:
        for tokens in CHAINS:
            expected = {
                w: sum(tokens[: n + 1] in held for n in range(len(tokens)))
                for w, held in self.held.items()
                if tokens[:1] in held
            }
            actual = {
                s.worker_id: d for d, mask in self.index.depths(chain_of(tokens)) for s in self.index.members(mask)
            }
            assert actual == expected

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.index.entries == sum(map(len, self.held.values()))
        assert {w: slot.blocks for w, slot in self.slots.items()} == {w: len(h) for w, h in self.held.items()}


TestIndex = IndexMachine.TestCase


def test_an_empty_chain_has_no_depths() -> None:
    assert BlockIndex().depths([]) == []


def test_a_swept_number_is_used_again() -> None:
    index = BlockIndex()
    first = index.open_slot("a", "1")
    index.store(first, [1, 2, 3])
    index.close_slot(first)
    assert index.open_slot("b", "1").number != first.number
    list(index.sweep(1.0))
    assert not index.needs_sweep()
    assert index.blocks() == 0
    assert index.open_slot("c", "1").number == first.number
    assert index.depths([1, 2, 3]) == []


def test_a_sweep_pauses_after_every_slice() -> None:
    index = BlockIndex()
    slot = index.open_slot("a", "1")
    index.store(slot, [random.Random(i).getrandbits(64) for i in range(1000)])
    index.close_slot(slot)
    assert sum(1 for _ in index.sweep(0.0)) > 1000


def test_a_worker_that_breaks_the_rule_gets_a_wrong_depth_and_no_error() -> None:
    index = BlockIndex()
    honest, broken = index.open_slot("honest", "1"), index.open_slot("broken", "1")
    index.store(honest, [1, 2, 3, 4])
    index.store(broken, [1, 2, 3, 4])
    index.remove(broken, [2])
    depths = {s.worker_id: d for d, mask in index.depths([1, 2, 3, 4]) for s in index.members(mask)}
    assert depths["honest"] == 4
