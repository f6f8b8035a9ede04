"""The engines that have to conform, each as a context that yields one which serves. A new engine is one line more."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.base import Engine
from services.worker.native.opening import open_native
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_simulated
from services.worker.vllm.opening import open_vllm
from tests.models import BUNDLED_MODEL
from tests.unit.worker.engine.stand_ins import NoObserver

SETTINGS = WorkerSettings(
    model=str(BUNDLED_MODEL),
    dtype="float32",
    kv_tokens=4096,
    max_model_len=512,
    max_running=8,
    adapter_sources=(tempfile.gettempdir(),),
    adapter_slots=2,
    adapter_max_rank=256,
)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncGenerator[Engine, None]:
    running = asyncio.create_task(engine.run())
    try:
        with engine.changes.watch() as changed:
            while engine.phase != pb.PHASE_SERVING:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if running.done():
                    running.result()
                changed.clear()
        yield engine
    finally:
        running.cancel()  # once: the ranks take their time to stop
        await asyncio.wait([running])


@asynccontextmanager
async def native() -> AsyncGenerator[Engine, None]:
    async with serving(await open_native(SETTINGS, BUNDLED_MODEL, NoObserver(), NoObserver())) as engine:
        yield engine


@asynccontextmanager
async def simulated() -> AsyncGenerator[Engine, None]:
    settings = SETTINGS.model_copy(update={"engine": "simulated"})
    async with serving(await open_simulated(settings, BUNDLED_MODEL, NoObserver(), NoObserver())) as engine:
        yield engine


@asynccontextmanager
async def vllm() -> AsyncGenerator[Engine, None]:
    settings = SETTINGS.model_copy(update={"engine_args": {"block_size": 32, "enforce_eager": True}})
    async with serving(await open_vllm(settings, BUNDLED_MODEL, NoObserver(), NoObserver())) as engine:
        yield engine


_OURS: dict[str, Callable[[], AbstractAsyncContextManager[Engine]]] = {"native": native, "simulated": simulated}
# vLLM has an environment of its own, in which `make test-vllm` runs.
ENGINES = {"vllm": vllm} if os.environ.get("RYZANSTEIN_TEST_ENGINE") == "vllm" else _OURS
COMPUTING = sorted(ENGINES.keys() & {"native", "vllm"})  # answers are those of the weights
