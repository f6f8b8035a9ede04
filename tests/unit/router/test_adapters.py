"""A request goes where its adapter is, as long as that is the fastest way to an answer."""

from __future__ import annotations

from collections import Counter

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.router.adapter_tracker import COPY_MS, READ_MS
from services.router.policies import make_policy
from services.router.snapshot import Query, hash64, why_not_for
from tests.unit.router.fleets import Lab


def holds(*slots: str, memory: tuple[str, ...] = ()) -> list[pb.ResidentAdapter]:
    actual = [pb.ResidentAdapter(digest=digest, in_slot=True) for digest in slots]
    return actual + [pb.ResidentAdapter(digest=digest) for digest in memory]


def choose(lab: Lab, adapter: str, request: str = "r") -> str:
    """Book a request of 16 tokens, as routers do; returns its worker."""
    snapshot = lab.pool.snapshot()
    query = Query(
        16,
        100,
        request_key=hash64(request),
        adapter=lab.pool.adapters.loads(adapter) if adapter else None,
    )
    choice = make_policy("cost").choose(snapshot, query, why_not_for(snapshot, query))
    assert choice is not None
    worker = snapshot.worker_ids[choice.index]
    lab.clock.now += 1e-3
    lab.pool.book(worker, int(lab.clock.now * 1e6), 16, adapter)
    return worker


def test_loading_is_a_cost_of_the_workers_that_must_load(lab: Lab) -> None:
    """Other times than the assumed ones once they are measured; none of it for the base's own requests."""
    assert lab.pool.adapters.loads("x").load_ms.tolist() == [READ_MS] * 4
    lab.tell("b", adapters=holds("x"))
    lab.tell("c", adapters=holds("y", memory=("x",)))
    assert lab.pool.adapters.loads("x").load_ms.tolist() == [READ_MS, 0, COPY_MS, READ_MS]
    lab.tell("c", adapters=holds(memory=("x",)), adapter_read_ms=300, adapter_copy_ms=5, adapter_slots_in_use=True)
    loads = lab.pool.adapters.loads("x")
    assert loads.load_ms.tolist() == [300, 0, 5, 300]
    assert loads.waits.tolist() == [0, 0, 1, 0]
    lab.pool.remove("a")
    assert lab.pool.adapters.loads("x").load_ms.tolist() == [0, 5, 300]
    lab.tell("b", incarnation="second")
    assert lab.pool.adapters.loads("x").load_ms.tolist() == [300, 5, 300]
    assert {choose(lab, "", str(i)) for i in range(40)} == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("state", "chosen"),
    [
        ({"running": 2}, {"b"}),
        ({"queued_prefill_tokens": 9_000}, {"b"}),  # 900 ms
        ({"queued_prefill_tokens": 11_000}, {"a", "c", "d"}),
        ({"phase": pb.PHASE_DRAINING}, {"a", "c", "d"}),
    ],
)
def test_a_worker_that_holds_the_adapter_is_chosen_while_loading_elsewhere_takes_longer(
    lab: Lab, state: dict[str, object], chosen: set[str]
) -> None:
    lab.tell("b", adapters=holds("x"), **state)
    assert choose(lab, "x") in chosen


def test_a_worker_with_all_adapter_slots_in_use_is_avoided(lab: Lab) -> None:
    for worker in ("a", "b", "c"):
        lab.tell(worker, adapters=holds("y"), adapter_slots_in_use=True)
    assert {choose(lab, "x", str(i)) for i in range(5)} == {"d"}
    lab.tell("d", running=40)
    assert choose(lab, "y") in {"a", "b", "c"}


def test_cold_adapters_stay_hot_adapters_spread_and_load_stays_even() -> None:
    """Eight adapters on four workers. One of them has most of the requests, more than a worker can take."""
    lab, seen = Lab(), dict[str, set[str]]()
    waiting, held = Counter[str](), {worker: set[str]() for worker in "abcd"}
    for worker in held:
        lab.join(worker)
    placed: Counter[str] = Counter()
    for i in range(800):
        adapter = "hot" if i % 8 else f"cold {i % 7}"
        worker = choose(lab, adapter, str(i))
        placed[worker] += 1
        waiting[worker] += 1
        held[worker].add(adapter)
        seen.setdefault(adapter, set()).add(worker)
        for each in waiting:  # all four together finish as many requests as arrive
            waiting[each] -= waiting[each] > 0 and i % 4 == 0
        acked, queued = {"router": int(lab.clock.now * 1e6)}, 1000 * waiting[worker]  # 100 ms for each
        state = {"queued_prefill_tokens": queued, "acked": acked, "adapter_read_ms": 500}
        lab.tell(worker, adapters=holds(*sorted(held[worker])), **state)
    assert seen.pop("hot") == set("abcd")
    assert sum(len(workers) for workers in seen.values()) <= 2.5 * len(seen), seen  # 4 workers in all
    assert max(placed.values()) <= 1.5 * min(placed.values()), placed
