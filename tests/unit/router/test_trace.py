from __future__ import annotations

from tests.unit.router.trace import NAMES, PER_DIGEST, QUERIES, SNAPSHOTS, digests, recorded


def test_decisions_equal_the_recorded_decisions() -> None:
    """Every policy over idle, busy and mixed fleets, with every reason it can give: a change of speed changes none."""
    now, then = digests(), recorded()
    assert len(now) == len(then) == SNAPSHOTS * QUERIES // PER_DIGEST
    differing = {
        name: [number * PER_DIGEST for number, (a, b) in enumerate(zip(now, then, strict=True)) if a[name] != b[name]]
        for name in NAMES
    }
    assert not any(differing.values()), f"decisions that differ, by the first of their {PER_DIGEST}: {differing}"
