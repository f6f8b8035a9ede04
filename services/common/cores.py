"""The number of cores that the processes of a service can share."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.cgroup import cpu_quotas


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, or the CPU quota if that is lower."""
    return max(1, int(min((len(os.sched_getaffinity(0)), *cpu_quotas(root)))))
