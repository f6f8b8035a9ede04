"""Opens the adapters of a worker's settings, for any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.common.lifecycle import StartupError
from services.compute.model.registry import Description
from services.worker.adapters.slots import AdapterSources
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import AdapterRef
from services.worker.engine.state import AdapterFacts
from services.worker.settings import WorkerSettings


def adapter_sources(
    settings: WorkerSettings, describe: Callable[[], Description], cache_bytes: int
) -> AdapterSources | None:
    """The adapters that a worker may read; None if its settings name none. `describe` reads its model's architecture.

    `cache_bytes`: bytes of each rank for adapters that may lose their slots.
    """
    if not settings.adapters and not settings.adapter_sources:
        return None
    named, within = tuple(settings.adapters.values()), tuple(settings.adapter_sources)
    return AdapterSources(describe(), settings.adapter_max_rank, named, within, cache_bytes, settings.adapter_slots)


async def named_adapters(settings: WorkerSettings, sources: AdapterSources | None) -> tuple[AdapterFacts, ...]:
    """The adapters of the settings. Raises StartupError."""
    _check_pins(settings)
    adapters = []
    for name, source in settings.adapters.items():
        assert sources is not None, "settings with adapters have slots"
        try:
            facts = await sources.inspect(source, name)
            adapters.append(replace(facts, pinned=name in settings.adapter_pins))
        except InvalidRequestError as error:
            raise StartupError(f"RYZANSTEIN_ADAPTERS {name}: {error}") from error
    return tuple(adapters)


def pinned_refs(adapters: Sequence[AdapterFacts]) -> tuple[AdapterRef, ...]:
    """Those of the settings' adapters that keep their slots."""
    return tuple(AdapterRef(one.digest, one.source, one.name) for one in adapters if one.pinned)


def _check_pins(settings: WorkerSettings) -> None:
    """Raise StartupError for pins that are unknown or too many."""
    pins = frozenset(settings.adapter_pins)
    if unknown := pins - settings.adapters.keys():
        raise StartupError(f"RYZANSTEIN_ADAPTER_PINS {min(unknown)}: not a name in RYZANSTEIN_ADAPTERS")
    if len(pins) >= settings.adapter_slots:
        raise StartupError(
            f"RYZANSTEIN_ADAPTER_PINS: {len(pins)} adapters; at most {settings.adapter_slots - 1} of the "
            f"{settings.adapter_slots} slots (RYZANSTEIN_ADAPTER_SLOTS), since one stays for others"
        )
