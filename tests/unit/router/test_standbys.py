"""Which worker is a request's standby."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ryzanstein.v1 import routing_pb2

from services.router.estimates import estimate
from services.router.routing import Evaluation, Placement
from services.router.sessions import Binding
from services.router.snapshot import Decision, Query, why_not_for
from services.router.standbys import standby_of
from tests.unit.router.fleets import Lab

ABLE = {"kv_bytes_per_token": 40_000, "kv_blocks_total": 1000, "standby_tokens": 2048}


def lab_of(**workers: dict[str, object]) -> Lab:
    lab = Lab()
    for name, fields in workers.items():
        lab.join(name, **{**ABLE, **fields})
    return lab


def standbys(
    lab: Lab,
    chosen: str,
    *,
    key: int = 1,
    prompt: int = 4000,
    matched: Sequence[int] = (),
    excluded: tuple[int, ...] = (),
) -> list[str]:
    """The ids of the standby and its spares."""
    snapshot = lab.pool.snapshot()
    query = Query(
        prompt,
        16,
        request_key=key,
        matched_tokens=np.array(matched, dtype=float) if matched else None,
        excluded=excluded,
    )
    member, estimates = lab.pool.members[chosen], estimate(snapshot, query)
    choice = Decision(member.index, "", estimates.at(member.index, estimates.ttft_ms))
    evaluation = Evaluation(lab.pool, snapshot, query, why_not_for(snapshot, query), choice)
    placed = Placement(evaluation, choice, member, Binding(chosen, member.incarnation), 1)
    hint = standby_of(routing_pb2.RouteRequest(prompt_tokens=prompt, max_tokens=16), placed)
    named = [hint, *hint.spares] if hint else []
    assert all(one.address == lab.pool.members[one.worker_id].address for one in named)
    return [one.worker_id for one in named]


def standby(lab: Lab, chosen: str, **fields: Any) -> str:
    """The standby's id; empty: none."""
    return next(iter(standbys(lab, chosen, **fields)), "")


def test_standby_is_another_worker_and_the_same_for_a_request() -> None:
    lab = lab_of(**{f"w{i}": {} for i in range(12)})
    chosen = {key: standby(lab, "w3", key=key) for key in range(200)}
    assert chosen == {key: standby(lab, "w3", key=key) for key in range(200)}
    assert set(chosen.values()) == {f"w{i}" for i in range(12) if i != 3}, "they spread over the pool"


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({}, {"prompt": 2000}),  # shorter than its worker wants, with its output
        ({"kv_bytes_per_token": 0}, {}),
        ({"kv_blocks_used": 501}, {}),
        ({}, {"excluded": (1,)}),
    ],
    ids=["short", "blocks cannot be moved", "full", "failed this request"],
)
def test_request_has_no_standby_when_no_worker_can_take_copies(
    other: dict[str, object], fields: dict[str, object]
) -> None:
    assert standby(lab_of(a={}, b={}), "a") == "b"
    assert not standby(lab_of(a={}, b=other), "a", **fields)  # type: ignore[arg-type]


def test_worker_alone_or_without_copies_has_no_standby() -> None:
    assert not standby(lab_of(a={}), "a")
    assert not standby(lab_of(a={"standby_tokens": 0}, b={}), "a")


def test_standby_is_on_another_machine_if_there_is_one() -> None:
    nodes = {"a": {"node": "n1"}, "b": {"node": "n1"}, "c": {"node": "n2"}}
    assert {standby(lab_of(**nodes), "a", key=key) for key in range(20)} == {"c"}
    del nodes["c"]
    assert standby(lab_of(**nodes), "a") == "b"


def test_next_workers_are_spares_of_the_standby() -> None:
    nodes = {"a": {"node": "n1"}, "b": {"node": "n1"}, "c": {"node": "n2"}, "full": {"kv_blocks_used": 501}}
    assert standbys(lab_of(**nodes), "a", matched=(4000, 3500, 0, 0)) == ["c", "b"]
    many = lab_of(**{f"w{i}": {} for i in range(12)})
    assert len(set(standbys(many, "w3")) - {"w3"}) == 3


def test_holder_of_the_prefix_remains_the_standby() -> None:
    lab = lab_of(a={}, b={}, c={}, d={})
    assert {standby(lab, "a", key=key, matched=(3500, 0, 3000, 0)) for key in range(20)} == {"c"}
    assert len({standby(lab, "a", key=key, matched=(3500, 0, 100, 0)) for key in range(50)}) == 3, "a prefix too short"
