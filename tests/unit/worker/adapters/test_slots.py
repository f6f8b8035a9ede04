"""Adapters that lose their slots stay in memory up to a bound, and what failed is tried again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ryzanstein.v1 import worker_pb2 as pb

from services.cli.stack.default_model import TINY_MODEL
from services.compute.model.registry import describe
from services.worker.adapters.slots import AdapterSlots, AdapterSources
from services.worker.engine.base import StepObserver
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import AdapterRef
from services.worker.engine.state import AdapterFacts, EngineCounters, EngineState
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.settings import WorkerSettings
from tests.adapters import write_adapter


@dataclass(frozen=True, slots=True)
class TenByteSources(AdapterSources):
    """Every folder holds an adapter of ten bytes, whose digest is the folder's name."""

    async def inspect(self, source: str, name: str = "", on_read: object = None) -> AdapterFacts:
        if "broken" in source:
            raise InvalidRequestError("adapter", "broken")
        return AdapterFacts(name, Path(source).name, source, 8, n_bytes=10)


@dataclass
class CountingRanks:
    """Keeps adapters as ranks do, and counts loads by where they read and how they end."""

    error: str = ""
    resident: set[str] = field(default_factory=set)
    loads: list[tuple[str, str, str]] = field(default_factory=list)
    loading: str = ""

    async def load(self, order: AdapterOrder) -> str:
        self.loading = order.digest
        self.resident -= set(order.forget)
        await asyncio.sleep(0)
        if self.error:
            return self.error
        assert order.folder or order.digest in self.resident
        self.resident |= {order.digest} if order.keep else set()
        return ""

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None:
        self.loads.append((self.loading, source, result))


async def test_an_adapter_that_is_larger_than_the_memory_is_read_again() -> None:
    ranks: Any = CountingRanks()
    sources: Any = TenByteSources(None, 64, (), (), cache_bytes=5, n_slots=1)  # type: ignore[arg-type]
    slots = AdapterSlots(sources, ranks.load, ranks, EngineCounters(), lambda: None, lambda *_: None)
    for name in "aba":
        await slots.take(AdapterRef(name, f"/{name}", name), "t")
        slots.give_back(name)
    assert ranks.loads == [("a", "files", "ok"), ("b", "files", "ok"), ("a", "files", "ok")]
    assert not ranks.resident


async def test_an_adapter_that_lost_its_slot_comes_from_memory() -> None:
    ranks, counters, changes = CountingRanks(), EngineCounters(), []
    sources: Any = TenByteSources(None, 64, (), (), cache_bytes=35, n_slots=2)  # type: ignore[arg-type]
    observer: StepObserver = ranks  # type: ignore[assignment]
    charged = list[str]()
    slots = AdapterSlots(
        sources, ranks.load, observer, counters, lambda: changes.append(1), lambda tenant, _: charged.append(tenant)
    )

    async def use(name: str) -> int:
        slot = await slots.take(AdapterRef(name, f"/{name}", name), f"tenant of {name}")
        slots.give_back(name)
        return slot

    assert [await use(name) for name in ("a", "b", "a")] == [1, 0, 1]
    assert await use("c") == 0
    assert await use("b") == 1
    assert charged == [f"tenant of {name}" for name in "abcb"], "who loads pays, and who finds it loaded does not"
    assert ranks.loads == [("a", "files", "ok"), ("b", "files", "ok"), ("c", "files", "ok"), ("b", "memory", "ok")]
    await use("d")
    assert ranks.resident == {"b", "c", "d"}, "35 bytes hold three; a was used longest ago"
    actual = slots.add_to(EngineState(pb.PHASE_SERVING, "")).adapters
    assert [(one.name, one.in_slot) for one in actual] == [("b", True), ("c", False), ("d", True)]
    assert counters.adapter_evictions == 3
    assert changes
    slots.pin([AdapterRef("a", "/a", "a"), AdapterRef("b", "/b", "b")])  # two of two slots: one stays for others
    for name in ("c", "d", "e"):
        await use(name)
    in_slots = {one.name for one in slots.add_to(EngineState(pb.PHASE_SERVING, "")).adapters if one.in_slot}
    assert in_slots == {"a", "e"}

    ranks.error = "disk is gone"
    waiting = [asyncio.create_task(use("f")) for _ in range(2)]
    assert [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == ["disk is gone"] * 2
    with pytest.raises(InvalidRequestError, match="broken"):
        await use("broken")
    ranks.error = ""
    assert await use("f") >= 0
    assert [result for _, _, result in ranks.loads[-3:]] == ["refused", "refused", "ok"]


async def test_an_impossible_path_is_the_caller_s_fault(tmp_path: Path) -> None:
    """Not the worker's, whose gateway would answer 503."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    sources = AdapterSources(describe(TINY_MODEL), 8, (), (str(tmp_path),))
    for path in ("a\0b", "two\nlines", "x" * 300, "loop", "../elsewhere", "none"):
        with pytest.raises(InvalidRequestError):
            await sources.inspect(f"{tmp_path}/{path}")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_file_that_links_out_of_the_sources_is_refused(name: str, tmp_path: Path) -> None:
    """Links within them are followed, as a cache of the hub has them."""
    model, other, folder = describe(TINY_MODEL), tmp_path / "other", tmp_path / "within/adapter"
    write_adapter(TINY_MODEL, other, {"q_proj": 4})
    write_adapter(TINY_MODEL, folder, {"q_proj": 4})
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)
    assert (await AdapterSources(model, 8, (), (str(tmp_path),)).inspect(str(folder))).rank == 4
    with pytest.raises(InvalidRequestError, match="adapters are loaded from these folders only"):
        await AdapterSources(model, 8, (), (str(folder.parent),)).inspect(str(folder))


@pytest.mark.parametrize(
    "settings", [{"adapters": {"a\nb": "/a"}}, {"adapters": {"a": "/a\0"}}, {"adapter_sources": ["/a\u202e"]}]
)
def test_settings_with_hidden_characters_in_names_or_paths_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="printable characters, no control or format characters"):
        WorkerSettings(model="m", **settings)
