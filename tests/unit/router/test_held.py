"""Prefixes that workers hold, by the numbers of the coordinator's roster."""

from __future__ import annotations

import random

import numpy as np
from ryzanstein.v1 import kv_pb2, worker_pb2

from services.router.held import PLACES, HeldPrefixes, Roster
from tests.unit.router.fleets import Lab

DEVICE, HOST = worker_pb2.KV_PLACE_DEVICE, worker_pb2.KV_PLACE_HOST


def roster(*places: tuple[str, str, int]) -> Roster:
    named = [kv_pb2.WorkerPlace(worker_id=name, incarnation=inc, place=place) for name, inc, place in places]  # type: ignore[arg-type]
    return Roster(kv_pb2.Roster(version=1, places=named))


def prefix(blocks: int, *numbers: int, size: int = 1) -> kv_pb2.HeldPrefix:
    return kv_pb2.HeldPrefix(blocks=blocks, places=sum(1 << number for number in numbers).to_bytes(size, "little"))


def test_depths_follow_workers_that_join_restart_and_leave() -> None:
    lab = Lab()
    for name in ("a", "b"):
        lab.join(name)
    first = [(name, "first", place) for name, place in (("b", DEVICE), ("a", HOST), ("c", DEVICE), ("a", 9))]
    places = roster(first[0], ("", "", DEVICE), *first[1:])
    answer = HeldPrefixes(places, [prefix(7, 0), prefix(5, 2, 3), prefix(3, 4)])
    assert answer.depths(lab.pool).tolist() == [[0, 7], [5, 0], [0, 0]], "neither place 9 nor a worker of another pool"
    lab.join("c")
    assert answer.depths(lab.pool).tolist() == [[0, 7, 5], [5, 0, 0], [0, 0, 0]]
    lab.tell("b", incarnation="second")
    assert answer.depths(lab.pool)[DEVICE].tolist() == [0, 0, 5], "a process that has started again holds no block"
    lab.pool.remove("a")
    assert answer.depths(lab.pool).tolist() == [[0, 5], [0, 0], [0, 0]]
    other = Lab()
    other.join("a")
    assert answer.depths(other.pool).tolist() == [[0], [5], [0]], "each pool by its own indices"
    assert HeldPrefixes(Roster(), []).depths(other.pool).tolist() == [[0], [0], [0]]


def test_numbers_and_names_give_the_same_depths() -> None:
    """The answers of a coordinator of this revision, and of the one before."""
    draw, lab = random.Random(3), Lab()
    for i in range(40):
        lab.join(f"w{i}")
    held = {(i, place): draw.randrange(1, 6) for i in range(40) for place in PLACES if draw.random() < 0.6}
    numbers = draw.sample([(i, place) for i in range(40) for place in PLACES], k=40 * len(PLACES))
    of_depth = {blocks: [n for n, at in enumerate(numbers) if held.get(at) == blocks] for blocks in range(1, 6)}
    by_number = [prefix(blocks, *some, size=15) for blocks, some in of_depth.items()]
    by_name = [
        kv_pb2.WorkerDepth(
            worker_id=f"w{i}",
            incarnation="first",
            blocks=held.get((i, DEVICE), 0),
            host_blocks=held.get((i, HOST), 0),
            disk_blocks=held.get((i, worker_pb2.KV_PLACE_DISK), 0),
        )
        for i in draw.sample(range(40), k=40)
    ]
    numbered = HeldPrefixes(roster(*((f"w{i}", "first", place) for i, place in numbers)), by_number).depths(lab.pool)
    assert np.count_nonzero(numbered) == len(held)
    assert (numbered == HeldPrefixes.by_worker(by_name).depths(lab.pool)).all()


def test_depth_of_one_worker_is_known_while_no_other_place_holds_more() -> None:
    draw, lab = random.Random(5), Lab()
    for i in range(20):
        lab.join(f"w{i}")
    first = [roster(*((f"w{i}", "first", DEVICE) for i in range(start, 20, 2))) for start in (0, 1)]
    for _ in range(50):
        numbers = [draw.sample(range(10), k=6) for _ in first]
        answers = [
            HeldPrefixes(places, [prefix(draw.randrange(1, 4), *some[:3], size=2), prefix(4, *some[3:5], size=2)])
            for places, some in zip(first, numbers, strict=True)
        ]
        depths = HeldPrefixes.joined(answers, lab.pool)
        assert depths is not None
        for member in lab.pool.members.values():
            own = depths[DEVICE, member.index]
            assert HeldPrefixes.deepest_at(answers, member) == (own if own == depths.max() else None)
    below = HeldPrefixes(roster(("w0", "first", DEVICE), ("w1", "first", HOST)), [prefix(4, 0)])
    member = lab.pool.members["w0"]
    assert HeldPrefixes.deepest_at([below], member) is None, "a load may take less than computing"
    assert HeldPrefixes.deepest_at([], member) == 0
    lab.tell("w0", incarnation="second")
    assert HeldPrefixes.deepest_at([HeldPrefixes(first[0], [prefix(4, 0)])], member) is None
