"""Whether the kernel killed a process of ours because memory ran out, and whose limit that was."""

from __future__ import annotations

from pathlib import Path

from services.common.cgroup import memory_limits, oom_kills

_MIB = 1 << 20


class MemoryKills:
    """Counts from now on. The ranks are in the server's own control group."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = oom_kills(root)

    def explain(self) -> str:
        """A clause for the reason of a death, or nothing: the counter is raised before the process is killed."""
        if oom_kills(self._root) <= self._before:
            return ""
        reached = [group.limit for group in memory_limits(self._root) if group.reached]
        whose = f"the container's memory limit of {min(reached) / _MIB:,.0f} MiB" if reached else "the machine's memory"
        return (
            f": {whose} was reached; lower RYZANSTEIN_KV_TOKENS or RYZANSTEIN_MAX_BATCHED_TOKENS, or give the worker "
            "more memory"
        )
