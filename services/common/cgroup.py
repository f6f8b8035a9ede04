"""Limits and counters of the control groups that this process is in, of versions 1 and 2.

A limit may be set on the process's own group or on any group above it (a pod's, a systemd slice). So all visible groups
are read; a container usually sees its own group as the root of the hierarchy. See cgroups(7).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One group's limit, in bytes."""

    limit: int
    used: int  # without the page cache, which the kernel frees before it fails an allocation
    peak: int  # the most ever charged, cache included; the limit itself if the kernel keeps no peak

    @property
    def reached(self) -> bool:
        """Whether memory ever reached the limit. The kernel charges batches of pages, hence the tolerance."""
        return self.peak >= self.limit * 0.99


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The memory limits of this process, starting with its own group's."""
    return [limit for group in _groups(root, "memory") if (limit := _memory_limit(group)) is not None]


def cpu_quotas(root: Path = Path("/")) -> list[float]:
    """The CPU limits of this process in cores, starting with its own group's."""
    return [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this process's own group were killed for lack of memory, by any group's limit."""
    for group in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (group / name).exists():
                return _table(group / name).get("oom_kill", 0)
    return 0


def _memory_limit(group: Path) -> MemoryLimit | None:
    if (group / "memory.max").exists():  # version 2; its root group has no such file
        limit, used, peak, prefix = "memory.max", "memory.current", "memory.peak", ""
    elif (group / "memory.limit_in_bytes").exists():  # version 1; `total_` values include the groups below
        limit, used, peak, prefix = (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "memory.max_usage_in_bytes",
            "total_",
        )
    else:
        return None
    text = (group / limit).read_text().strip()
    if text == "max":
        return None
    stat = _table(group / "memory.stat")
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    most = int((group / peak).read_text()) if (group / peak).exists() else int(text)
    return MemoryLimit(int(text), max(0, int((group / used).read_text()) - cache), most)


def _cpu_quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():  # version 2
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").exists():  # version 1
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _table(file: Path) -> dict[str, int]:
    """Parse lines of `name number`."""
    if not file.exists():
        return {}
    pairs = (line.split() for line in file.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and of the groups above it, in the hierarchy with the controller."""
    memberships = _memberships(root / "proc/self/cgroup")
    for hierarchy, top, mounted in _mounts(root / "proc/self/mountinfo"):
        if hierarchy not in (controller, "2") or hierarchy not in memberships:
            continue
        mount, own = root / mounted.relative_to("/"), PurePosixPath(memberships[hierarchy])
        # The mount may show only a part of the hierarchy: in a container, it begins at the container's group.
        below = own.relative_to(top) if own.is_relative_to(top) and ".." not in own.parts else PurePosixPath()
        yield from (mount / part for part in (below, *below.parents))


def _memberships(file: Path) -> dict[str, str]:
    """This process's group, by controller for version 1 and by "2" for version 2; see cgroups(7)."""
    if not file.exists():
        return {}
    groups: dict[str, str] = {}
    for line in file.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(",") if controllers else ("2",), group)
    return groups


def _mounts(file: Path) -> Iterator[tuple[str, str, PurePosixPath]]:
    """Each hierarchy's controller (or "2"), mounted group and mount point; see proc_pid_mountinfo(5)."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        before, _, after = line.partition(" - ")
        top, mounted = before.split()[3:5]
        kind, _, options = after.split()
        if kind == "cgroup2":
            yield "2", top, PurePosixPath(mounted)
        elif kind == "cgroup":
            for controller in options.split(","):
                yield controller, top, PurePosixPath(mounted)
