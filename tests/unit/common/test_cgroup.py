"""A container's limits are read from the files of both hierarchies, and from the real ones of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.cgroup import cpu_quotas, memory_limits, oom_kills
from services.common.cores import usable_cores
from services.compute.backends.sizing import available_host_memory
from tests.unit.common.containers import container, container_v1, groups_v1, write

MIB = 1 << 20
STAT = "anon 7\ninactive_file 300\nactive_file 200\ntotal_inactive_file 3000\ntotal_active_file 2000"


def test_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    container(tmp_path, {"memory.max": 1000, "memory.current": 990, "memory.stat": STAT})
    (limit,) = memory_limits(tmp_path)
    assert (limit.limit, limit.used, limit.reached) == (1000, 490, True)
    files = {"memory.limit_in_bytes": 9000, "memory.usage_in_bytes": 8990, "memory.max_usage_in_bytes": 8995}
    container_v1(tmp_path / "v1", files | {"memory.stat": STAT})
    (limit,) = memory_limits(tmp_path / "v1")
    assert (limit.limit, limit.used, limit.reached) == (9000, 3990, True)


def test_every_group_on_the_way_up_counts(tmp_path: Path) -> None:
    container(
        tmp_path,
        {"memory.max": "max", "memory.current": 5, "cpu.max": "400000 100000", "memory.events": "oom 2\noom_kill 1"},
        group="/pod/worker",
        parents={
            "/pod": {"memory.max": 2000, "memory.current": 900, "memory.peak": 1000, "cpu.max": "250000 100000"},
            "/": {"cpu.stat": "usage_usec 5"},
        },
    )
    assert [(group.limit, group.used, group.reached) for group in memory_limits(tmp_path)] == [(2000, 900, False)]
    assert cpu_quotas(tmp_path) == [4.0, 2.5]
    assert oom_kills(tmp_path) == 1


@pytest.mark.parametrize(
    ("group", "top"),
    [
        ("/kubepods/pod1/c1", "/kubepods/pod1/c1"),  # the mount is the container's own group
        ("/kubepods/pod1/c1", "/kubepods"),
        ("/../../other", "/docker/c1"),  # seen from a namespace that the process is not beneath
    ],
)
def test_a_container_finds_its_group_wherever_its_mount_begins(tmp_path: Path, group: str, top: str) -> None:
    files = {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000, "memory.oom_control": "under_oom 0\noom_kill 3"}
    if group.startswith("/.."):
        container_v1(tmp_path, files, top=top, group=top)
        write(tmp_path / "proc/self", {"cgroup": f"5:memory:{group}\n4:cpu,cpuacct:{group}"})
    else:
        container_v1(tmp_path, files, group=group, top=top)
    assert (cpu_quotas(tmp_path), oom_kills(tmp_path)) == ([0.5], 3)


def test_limits_are_empty_without_control_groups(tmp_path: Path) -> None:
    assert (memory_limits(tmp_path), cpu_quotas(tmp_path), oom_kills(tmp_path)) == ([], [], 0)


def test_a_real_container_with_a_full_cache_has_memory_left(tmp_path: Path) -> None:
    with groups_v1() as groups:
        (groups["memory"] / "memory.limit_in_bytes").write_text(str(96 * MIB))
        (groups["cpu"] / "cpu.cfs_quota_us").write_text("100000")
        big = tmp_path / "big"
        big.write_bytes(os.urandom(MIB) * 120)
        os.sync()
        with big.open("rb") as stream:  # written by us, it would be charged to us
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        look = (
            f"import os, pathlib\nfor group in {[str(group) for group in groups.values()]}:\n"
            "    pathlib.Path(group, 'cgroup.procs').write_text(str(os.getpid()))\n"
            f"for _ in open({str(big)!r}, 'rb'): pass\n"
            "from services.compute.backends.sizing import available_host_memory\n"
            "from services.common.cores import usable_cores\n"
            "print(available_host_memory(), usable_cores(), int(pathlib.Path("
            f"{str(groups['memory'])!r}, 'memory.usage_in_bytes').read_text()))"
        )
        answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    available, cores, charged = map(int, answer.stdout.split())
    assert cores == 1
    assert charged > 80 * MIB, "the cache should fill the limit, or this shows nothing"
    assert 40 * MIB < available <= 96 * MIB
    assert available_host_memory() > 96 * MIB
    assert usable_cores() == len(os.sched_getaffinity(0))
