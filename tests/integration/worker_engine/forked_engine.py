"""The native engine on forked ranks, for tests of what it computes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.worker.engine.base import Engine
from services.worker.native.opening import open_native
from services.worker.process.launcher import Launcher
from services.worker.settings import WorkerSettings
from tests.forked_ranks import ForkedRanks
from tests.integration.worker_engine.engines import serving
from tests.unit.worker.engine.stand_ins import NoObserver


@asynccontextmanager
async def forked(folder: Path, **settings: Any) -> AsyncGenerator[Engine, None]:
    """The native engine of a model of 128 positions, which computes chunks of 13 rows on forked ranks."""
    settings |= {"model": str(folder), "dtype": "float32", "max_model_len": 128, "max_batched_tokens": 13}
    chosen = WorkerSettings(**settings)
    with patch.object(Launcher, "spawn", ForkedRanks.spawn):
        async with serving(await open_native(chosen, folder, NoObserver(), NoObserver())) as engine:
            yield engine
