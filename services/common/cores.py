"""How many cores there are to share between the processes of a service."""

from __future__ import annotations

import os
from pathlib import Path

from services.common.cgroup import cpu_quotas


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, or less under a container's quota."""
    return max(1, int(min((len(os.sched_getaffinity(0)), *cpu_quotas(root)))))
