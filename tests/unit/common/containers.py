"""Folders that look to a process like a container's /proc and /sys."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

Files = Mapping[str, object]

V2_MOUNT = "36 25 0:32 {top} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate"
V1_MOUNTS = (
    "36 35 0:33 {top} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "37 35 0:34 {top} /sys/fs/cgroup/memory ro master:14 - cgroup cgroup rw,memory"
)


def container(root: Path, files: Files, *, parents: Mapping[str, Files] | None = None, group: str = "/") -> None:
    """One of version 2, whose process is in `group` of what it sees; `parents` are groups above it."""
    _proc(root, "36 25 0:32 / / rw - overlay overlay rw\n" + V2_MOUNT.format(top="/"), f"0::{group}\n")
    mount = root / "sys/fs/cgroup"
    for path, contents in ((group, files), *(parents or {}).items()):
        write(mount / path.strip("/"), contents)


def container_v1(root: Path, files: Files, *, group: str = "/", top: str = "/") -> None:
    """One of version 1 whose process is in `group`, and which sees the hierarchy from `top` on."""
    _proc(root, V1_MOUNTS.format(top=top), f"5:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:/\n")
    below = group.removeprefix(top).strip("/")
    for name, text in files.items():
        controller = "cpu,cpuacct" if name.startswith("cpu") else "memory"
        write(root / "sys/fs/cgroup" / controller / below, {name: text})


def write(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def _proc(root: Path, mounts: str, groups: str) -> None:
    write(root / "proc/self", {"mountinfo": mounts, "cgroup": groups.rstrip()})


@contextmanager
def groups_v1() -> Iterator[dict[str, Path]]:
    """Real groups of version 1 of our own, where this machine lets us make some; else the test is skipped."""
    name = f"ryzanstein-test-{uuid.uuid4().hex[:8]}"
    groups = {controller: Path("/sys/fs/cgroup", controller, name) for controller in ("memory", "cpu")}
    try:
        for group in groups.values():
            group.mkdir()
    except OSError as error:
        pytest.skip(f"groups of version 1 take root and a kernel that has them mounted: {error.strerror}")
    yield groups
    for group in groups.values():
        group.rmdir()
