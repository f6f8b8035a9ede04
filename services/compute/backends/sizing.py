"""Checks that memory suffices for a rank's KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.cgroup import memory_limits

_MIB = 1 << 20
_LEAST_KV_TOKENS = 2048


class NotEnoughMemoryError(RuntimeError):
    """The configured KV cache does not fit; the message names the needed and the available memory."""


def least_kv_tokens(kv_tokens: int, max_model_len: int) -> int:
    """Return the smallest size of a KV cache of `kv_tokens` when memory is short: some prompts must still fit."""
    return min(kv_tokens, max_model_len, _LEAST_KV_TOKENS)


def require_memory(needed: int, available: int, *, what: str) -> None:
    """Raise NotEnoughMemoryError unless `needed` bytes are available."""
    if needed > available:
        raise NotEnoughMemoryError(
            f"{what} needs {needed / _MIB:,.0f} MiB but {available / _MIB:,.0f} MiB are available; "
            "lower RYZANSTEIN_KV_TOKENS, use a smaller dtype, or give the worker more memory"
        )


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Memory that this process may still allocate. Page cache counts as free, because the kernel drops it first."""

    available: int
    limit: int | None  # limit of the control group with the least memory; None: the machine has least


def host_room(root: Path = Path("/")) -> HostRoom:
    """Return the machine's free memory, or a container's if that is less."""
    rooms = [HostRoom(max(0, group.limit - group.used), group.limit) for group in memory_limits(root)]
    rooms.append(HostRoom(_mem_available(root / "proc/meminfo"), None))
    return min(rooms, key=lambda room: room.available)


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still allocate."""
    return host_room(root).available


def _mem_available(meminfo: Path) -> int:
    lines = meminfo.read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
