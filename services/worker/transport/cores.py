"""How many cores there are to share between the server and its ranks."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, or less under a cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    quota_file = root / "sys/fs/cgroup/cpu.max"
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores
