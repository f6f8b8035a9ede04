"""Books of a place: whole prefixes, its bound, holds, and events that replay to what it holds."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.host_store import HostStore
from services.worker.scheduling.places import BlockName
from tests.unit.worker.kv_transfer.test_disk_store import SIZE, chain


def a_store(n_blocks: int, events: KvEventLog | None = None) -> HostStore:
    return HostStore(SIZE, n_blocks * SIZE, events or KvEventLog(10**6), PlaceTotals())


def put(store: HostStore, name: BlockName) -> bool:
    if not store.prepare_store(name):
        return False
    asyncio.run(store.write([name], [name.digest]))
    store.complete_store(name, stored=True)
    return True


def held(store: HostStore, names: list[BlockName]) -> int:
    return store.lookup([name.digest for name in names])


def test_block_counts_from_its_completion_on() -> None:
    store, (name, *_) = a_store(4), chain(1)
    assert store.prepare_store(name)
    assert held(store, [name]) == 0
    assert not store.prepare_store(name), "it is on its way"
    store.complete_store(name, stored=True)
    assert held(store, [name]) == 1


def test_block_without_its_parent_is_not_stored() -> None:
    store, names = a_store(4), chain(2)
    assert not store.prepare_store(names[1])
    assert len(store) == 0


def test_failed_store_forgets_the_block_and_its_children() -> None:
    store, names = a_store(4), chain(2)
    assert store.prepare_store(names[0])
    assert store.prepare_store(names[1])
    store.complete_store(names[0], stored=False)
    store.complete_store(names[1], stored=True)
    assert len(store) == 0
    assert store.totals.bytes == 0


def test_least_recently_used_leaf_is_evicted_first() -> None:
    store, one, two = a_store(4), chain(2), chain(3, first=50)
    for name in (*one, *two[:2]):
        assert put(store, name)
    store.touch([name.digest for name in one])
    assert put(store, two[2])
    assert (held(store, one), held(store, two)) == (1, 3), "the end of the other prefix makes room"
    assert put(store, chain(1, first=70)[0])
    assert len(store) == 4


def test_used_prefix_stays_and_a_held_block_is_not_evicted() -> None:
    store, one, two, three = a_store(4), chain(2), chain(2, first=50), chain(2, first=20)
    for name in (*one, *two):
        assert put(store, name)
    store.touch([name.digest for name in one])
    entries = store.prepare_load([name.digest for name in two])
    assert put(store, three[0])
    assert (held(store, one), held(store, two)) == (1, 2), "the held prefix is whole"
    store.complete_load(entries)
    assert put(store, three[1])
    assert len(store) == 4


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_prefixes_whole_and_events_in_step(seed: int) -> None:
    rng, events = random.Random(seed), KvEventLog(10**6)
    store = a_store(rng.choice([3, 10, 30]), events)
    prompts = [chain(12, first=first) for first in (0, 7, 33, 60)]
    loads = []
    for _ in range(600):
        names = rng.choice(prompts)
        roll = rng.random()
        if roll < 0.6:
            for name in names[: rng.randrange(13)]:
                put(store, name)
        elif roll < 0.75:
            n = held(store, names)
            loads.append(store.prepare_load([name.digest for name in names[:n]]))
        elif roll < 0.9 and loads:
            store.complete_load(loads.pop(rng.randrange(len(loads))))
        elif roll < 0.95:
            store.discard(rng.choice(names).digest)
        else:
            store.touch([name.digest for name in names])
        assert len(store) <= store.capacity
        assert store.totals.bytes == len(store) * SIZE
        for each in prompts:
            assert sum(name.digest in store for name in each) == held(store, each), "a prefix with a hole"
    events.flush()
    replayed: set[int] = set()
    for event in events.since(0) or ():
        assert event.place is BlockPlace.HOST
        assert not replayed & set(event.stored)
        assert replayed >= set(event.removed)
        replayed = (replayed | set(event.stored)) - set(event.removed)
    assert replayed == set(store.hashes())
    assert all(
        asyncio.run(store.read([name.digest]))[0] is not None
        for each in prompts
        for name in each
        if name.digest in store
    )
