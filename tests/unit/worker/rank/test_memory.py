"""KV caches are sized by tokens or bytes, and refused with numbers when the memory is not there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.backends.sizing import (
    HostRoom,
    NotEnoughMemoryError,
    available_host_memory,
    host_room,
    require_memory,
)
from services.compute.ranks.config import RankGroupConfig
from services.worker.rank.memory import MemoryMeter
from tests.unit.common.containers import container


def test_tokens_are_rounded_up_to_blocks() -> None:
    assert RankGroupConfig("m", kv_tokens=100).blocks_wanted == 7
    assert RankGroupConfig("m", n_blocks=9).blocks_wanted == 9


def test_too_little_memory_names_need_and_supply() -> None:
    require_memory(5, 5, what="x")
    with pytest.raises(NotEnoughMemoryError, match="a KV cache needs 3 MiB but 1 MiB are available"):
        require_memory(3 << 20, 1 << 20, what="a KV cache")


def test_the_tighter_of_machine_and_container_counts(tmp_path: Path) -> None:
    root = tmp_path
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8192 kB\n")
    assert available_host_memory(root) == 8 << 20
    for limit, used, expected in ((3000, 1000, 2000), (3000, 4000, 0), (1 << 62, 1000, 8 << 20)):
        container(root, {"memory.max": limit, "memory.current": used})
        assert available_host_memory(root) == expected
        assert host_room(root) == HostRoom(expected, None if limit == 1 << 62 else limit)


class Left:
    """Memory of which so many bytes are left."""

    def __init__(self, left: int) -> None:
        self._left = left

    def held(self) -> int:
        return 0

    def release(self) -> None:
        """All that is freed is given back at once."""

    def available(self, ranks: int) -> int:
        return self._left // ranks


def n_blocks(left: int, **sizes: int | bool) -> int:
    """Of 16 tokens at 10 bytes each; a step takes 1,000 bytes."""
    config = RankGroupConfig("", max_model_len=8192, **{"kv_tokens": 32_768, **sizes})  # type: ignore[arg-type]
    return MemoryMeter(Left(left)).size_kv_cache(config, 10, 1000, SingleRank(), torch.device("cpu"))


def test_the_default_cache_takes_the_remaining_memory(caplog: pytest.LogCaptureFixture) -> None:
    whole, least = (1000 + 160 * (tokens // 16 + 1) for tokens in (32_768, 2048))
    assert n_blocks(whole, kv_fits=True) == n_blocks(whole) == 2048
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert n_blocks(whole - 1, kv_fits=True) == 2047
    assert "has 32752 tokens instead of 32768" in caplog.text
    assert n_blocks(least, kv_fits=True) == 128
    for left, sizes in ((least - 1, {"kv_fits": True}), (whole - 1, {})):
        with pytest.raises(NotEnoughMemoryError, match="and the workspace of a step needs"):
            n_blocks(left, **sizes)
