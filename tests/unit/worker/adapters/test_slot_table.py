"""Slots of adapters: granted, evicted, and waited for only so long."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.worker.adapters.slot_table import PATIENCE_S, PROTECTED_S, AdapterSlotTable, SlotUser


@dataclass
class Bench:
    """Slots under a clock that tests move."""

    n_slots: int = 4
    now: float = 100.0
    table: AdapterSlotTable = field(init=False)
    users: dict[str, SlotUser] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = AdapterSlotTable(self.n_slots, lambda: self.now)

    def want(self, digest: str, tenant: str = "") -> bool:
        """Begin to use an adapter; returns whether it has a slot."""
        self.now += 0.01
        if digest not in self.users:
            self.users[digest] = self.table.add(digest, digest, tenant)
            self.table.wait(self.users[digest])
        self.table.use(self.users[digest], tenant)
        self.settle()
        return self.users[digest].slot >= 0

    def end(self, digest: str) -> None:
        self.now += 0.01
        self.table.unuse(self.users[digest])
        self.settle()

    def settle(self) -> None:
        placed, evicted = self.table.place()
        for user in placed:
            user.loaded = True
        for user in evicted:
            del self.users[user.digest]

    def placed(self) -> set[str]:
        slots = [user.slot for user in self.users.values() if user.slot >= 0]
        assert len(slots) == len(set(slots))
        return {digest for digest, user in self.users.items() if user.slot >= 0}


def test_an_adapter_dropped_while_waiting_gets_no_slot() -> None:
    bench = Bench(n_slots=1)
    assert bench.want("a")
    assert not bench.want("b")
    bench.table.drop(bench.users["b"])
    bench.end("a")
    assert bench.placed() == {"a"}


def test_the_lru_adapter_is_evicted_unless_in_use_or_pinned() -> None:
    bench = Bench()
    bench.table.pinned = {"a"}
    for digest in "abcd":
        assert bench.want(digest)
    for digest in "acd":
        bench.end(digest)
    bench.want("c")
    bench.end("c")
    assert bench.want("e")
    assert bench.placed() == {"a", "b", "c", "e"}
    assert bench.want("f")
    assert bench.placed() == {"a", "b", "e", "f"}
    assert not bench.want("g")
    assert bench.table.in_use, "the pinned one is idle, but stays"
    bench.table.pinned = frozenset()
    bench.settle()
    assert bench.placed() == {"b", "e", "f", "g"}
    assert bench.table.in_use


def test_a_tenant_evicts_at_most_its_share_of_other_tenants_adapters() -> None:
    bench = Bench()
    for digest in ("ours 1", "ours 2"):
        bench.want(digest, "we")
        bench.end(digest)
    for number in range(20):
        assert bench.want(f"theirs {number}", "they")
        bench.end(f"theirs {number}")
    assert bench.placed() == {"ours 1", "ours 2", "theirs 18", "theirs 19"}
    bench.now += PROTECTED_S
    bench.want("theirs 20", "they")
    bench.end("theirs 20")
    assert bench.placed() == {"ours 2", "theirs 18", "theirs 19", "theirs 20"}, "unused slots are lent"
    bench.want("ours 1", "we")
    assert bench.placed() == {"ours 1", "ours 2", "theirs 19", "theirs 20"}, "and taken back"


def test_a_tenant_with_few_slots_is_first_for_a_free_slot() -> None:
    bench = Bench()
    for digest in "abcd":
        bench.want(digest, "they")
    assert not bench.want("e", "they")
    assert not bench.want("f", "we")
    bench.end("a")
    assert "f" in bench.placed()
    bench.end("b")
    assert "e" in bench.placed()


def test_an_adapter_with_endlessly_overlapping_requests_yields_after_a_while() -> None:
    bench = Bench(n_slots=2)
    bench.want("a")
    bench.want("b")
    bench.want("a")
    assert not bench.want("c")
    assert not any(bench.table.yields(bench.users[digest]) for digest in "ab")
    bench.now += 1.1 * PATIENCE_S
    assert bench.table.yields(bench.users["b"])
    assert not bench.table.yields(bench.users["a"])
    bench.end("b")
    assert bench.placed() == {"a", "c"}
    bench = Bench()
    for digest, tenant in (("x", "we"), ("y", "we"), ("1", "they"), ("2", "they")):
        bench.want(digest, tenant)
    assert not bench.want("3", "they")
    bench.now += 1.1 * PATIENCE_S
    assert [digest for digest in "xy123" if bench.table.yields(bench.users[digest])] == ["1"], "its own tenant's"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.booleans()), max_size=60), st.data())
def test_slots_are_held_once_and_every_request_gets_a_slot(
    events: list[tuple[str, str, bool]], data: st.DataObject
) -> None:
    bench = Bench(n_slots=3)
    bench.table.pinned = {"a"}
    for digest, tenant, ends in events:
        user = bench.users.get(digest)
        if ends and user is not None and user.users and user.slot >= 0:
            bench.end(digest)
        else:
            bench.want(digest, tenant)
        assert len(bench.placed()) <= 3
    while any(user.users for user in bench.users.values()):
        busy = [digest for digest, user in bench.users.items() if user.users and user.slot >= 0]
        assert busy, "somebody waits although no slot is in use"
        bench.end(data.draw(st.sampled_from(busy)))
        bench.now += PROTECTED_S
