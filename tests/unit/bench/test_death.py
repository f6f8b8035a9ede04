"""Both ways of knowing are measured on a real process."""

from __future__ import annotations

from bench.death import measure


def test_a_killed_process_is_known_to_be_dead_by_lock_and_by_pidfd() -> None:
    death = measure(mib=8)
    assert death.by_lock > 0
    assert death.by_pidfd > 0
