"""The supervisor of a pod reaps what its workers leave behind, and none of its own."""

from __future__ import annotations

import os
from pathlib import Path

from services.worker.pool.main import reap_orphans


def _ended() -> int:
    """The id of a child that has ended and that is not reaped."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_orphans_are_reaped_and_own_processes_are_left() -> None:
    orphan = _ended()
    reap_orphans(set())
    assert not Path(f"/proc/{orphan}").exists()
    own = _ended()
    reap_orphans({own})
    assert os.waitpid(own, 0) == (own, 0)
