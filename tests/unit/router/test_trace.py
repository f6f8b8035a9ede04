from __future__ import annotations

from tests.unit.router.trace import NAMES, PER_DIGEST, QUERIES, SNAPSHOTS, digests, recorded


def test_a_hundred_thousand_decisions_are_those_that_were_recorded() -> None:
    now, then = digests(), recorded()
    assert len(now) == len(then) == SNAPSHOTS * QUERIES // PER_DIGEST == 100
    differing = {
        name: [number * PER_DIGEST for number, (a, b) in enumerate(zip(now, then, strict=True)) if a[name] != b[name]]
        for name in NAMES
    }
    assert not any(differing.values()), f"thousands that differ, by their first decision: {differing}"
