"""Runs the fine-tuner: waits for jobs in Redis and trains one at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from redis.exceptions import RedisError

from services.common.fine_tuning.records import Presence
from services.common.fine_tuning.store import JobStore, LostClaimError
from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError, run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.redis_client import open_redis
from services.common.tasks import end_tasks
from services.finetuner.folders import keep_tidy
from services.finetuner.job import JobRun
from services.finetuner.settings import FinetunerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

_TIMEOUT_S = 5.0  # for a Redis operation
_AGAIN_S = 0.5  # between tries while Redis is away
_LOOK_S = 0.5
_APPEAR_S = 5.0
_LIFE_S = 7 * 24 * 3600  # of a job that has ended
_NEEDED = ("torch", "transformers", "peft")


async def patiently(operation: Callable[[], Awaitable[T]]) -> T:
    """Try an operation until Redis answers."""
    while True:
        try:
            return await operation()
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("Redis is away: %s", error)
            await asyncio.sleep(_AGAIN_S)


async def serve(settings: FinetunerSettings, stop: asyncio.Event) -> None:
    """Train until `stop`; raises :class:`StartupError`."""
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        raise StartupError(f"{', '.join(missing)} missing: pip install 'ryzanstein[finetune]'")
    await asyncio.to_thread(Path(settings.finetuner_folder).mkdir, parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    redis = open_redis(settings.redis, _TIMEOUT_S)
    store = JobStore(redis, RedisKeys(settings.namespace), patiently, _LIFE_S)
    try:
        with serve_metrics(settings.host, settings.metrics_port, new_registry("finetuner"), lambda: ""):
            async with asyncio.TaskGroup() as group:
                appearing = group.create_task(_appear(store, settings, owner))
                working = group.create_task(_work(store, settings, owner, stop))
                keep_s = settings.finetuner_keep_days * 24 * 3600
                tidying = group.create_task(keep_tidy(Path(settings.finetuner_folder) / "jobs", store, keep_s))
                await stop.wait()
                await asyncio.wait([working], timeout=settings.finetuner_lease_s)  # it gives its job back
                await end_tasks([appearing, working, tidying])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S):
                    await store.leave(owner)
    finally:
        await redis.aclose()


async def _appear(store: JobStore, settings: FinetunerSettings, owner: str) -> None:
    quantizations = ["none", "nf4"] if find_spec("bitsandbytes") else ["none"]
    presence = Presence(models=sorted(settings.finetuner_models), quantizations=quantizations)
    while True:
        await store.appear(owner, presence)
        await asyncio.sleep(_APPEAR_S)


async def _work(store: JobStore, settings: FinetunerSettings, owner: str, stop: asyncio.Event) -> None:
    """Run jobs, one at a time, until `stop`."""
    while not stop.is_set():
        claim = await store.claim(owner, settings.finetuner_lease_s, ["train"])
        if claim is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await stop.wait()
            continue
        try:
            await JobRun(claim, store, settings, stop).run()
        except LostClaimError:
            log.info("%s: cancelled, or taken over", claim.member)
        except Exception as error:  # a bug
            log.exception("%s: given up for now", claim.member)
            with contextlib.suppress(LostClaimError):
                await store.fault(claim, error, settings.finetuner_lease_s)


def main() -> None:
    """Entry point of ``python -m services.finetuner``."""
    run_service("finetuner", FinetunerSettings, serve)
