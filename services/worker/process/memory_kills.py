"""Detects kills by the kernel's OOM killer, and names the memory limit that was reached."""

from __future__ import annotations

from pathlib import Path

from services.common.cgroup import memory_limits, oom_kills

_MIB = 1 << 20


class MemoryKills:
    """Compares the OOM kills with their count at construction. The ranks are in the server's control group."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = oom_kills(root)

    def explain(self) -> str:
        """A clause for the reason of a death, or "". The kernel raises the counter before it kills the process."""
        if oom_kills(self._root) <= self._before:
            return ""
        reached = [group.limit for group in memory_limits(self._root) if group.reached]
        whose = f"the container's memory limit of {min(reached) / _MIB:,.0f} MiB" if reached else "the machine's memory"
        return (
            f": {whose} was reached; lower RYZANSTEIN_KV_TOKENS or RYZANSTEIN_MAX_BATCHED_TOKENS, or give the worker "
            "more memory"
        )
