"""Runs the fine-tuner: waits for jobs in Redis and has them trained, in processes of its own or in Kubernetes Jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from redis.exceptions import RedisError

from services.common.extras import pip_install
from services.common.fine_tuning.records import Presence
from services.common.fine_tuning.store import TuningClaim, TuningStore
from services.common.jobs.claim import LostClaimError
from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError, run_service
from services.common.metrics import new_registry, serve_metrics
from services.common.redis_client import open_redis
from services.common.tasks import end_tasks, retried, running_loops, wait_for_event
from services.finetuner.child import ChildRunner
from services.finetuner.folders import keep_tidy
from services.finetuner.job import LEASE_S, JobRun
from services.finetuner.metrics import FinetunerMetrics
from services.finetuner.runner import TrainingRunner
from services.finetuner.settings import FinetunerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

_TIMEOUT_S = 5.0  # for a Redis operation
_AGAIN_S = 0.5  # between tries while Redis is away
_LOOK_S = 0.5
_APPEAR_S = 5.0
_SWEEP_S = 30.0
_LIFE_S = 7 * 24 * 3600  # life of an ended job
_NEEDED = ("torch", "transformers", "peft")
_NEEDED_FOR_JOBS = ("kubernetes",)


async def patiently(operation: Callable[[], Awaitable[T]]) -> T:
    """Try an operation until Redis answers."""
    while True:
        try:
            return await operation()
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("Redis is away: %s", error)
            await asyncio.sleep(_AGAIN_S)


async def serve(settings: FinetunerSettings, stop: asyncio.Event, lease_s: float = LEASE_S) -> None:
    """Train until `stop`; raises :class:`StartupError`."""
    # Opening waits for an API server that is away, and `stop` also ends that wait.
    opening, stopping = asyncio.create_task(_open_runner(settings)), asyncio.create_task(stop.wait())
    await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
    try:
        if opening.done():
            await _train(opening.result(), settings, stop, lease_s)
    finally:
        await end_tasks((opening, stopping))


async def _train(runner: TrainingRunner, settings: FinetunerSettings, stop: asyncio.Event, lease_s: float) -> None:
    await asyncio.to_thread(Path(settings.finetuner_folder).mkdir, parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    redis = open_redis(settings.redis, _TIMEOUT_S)
    store = TuningStore(redis, RedisKeys(settings.namespace), patiently, _LIFE_S)
    registry = new_registry("finetuner")
    finetuner = Finetuner(store, runner, settings, FinetunerMetrics(registry), owner, stop, lease_s)

    def waits_for() -> str:
        return "" if finetuner.appeared.is_set() else "gateways have not been told what can be trained here"

    try:
        with serve_metrics(settings.host, settings.metrics_port, registry, waits_for):
            keep_s = settings.finetuner_keep_days * 24 * 3600
            tidying = retried(partial(keep_tidy, Path(settings.finetuner_folder) / "jobs", store, keep_s))
            work = [finetuner.work() for _ in range(settings.finetuner_parallel)]
            async with (
                running_loops(stop, finetuner.appear(), finetuner.sweep_loop(), tidying),
                running_loops(stop, *work) as working,
            ):
                await stop.wait()
                await asyncio.wait(working, timeout=lease_s)  # they give their jobs back
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S):
                    await store.leave(owner)
    finally:
        await redis.aclose()


async def _open_runner(settings: FinetunerSettings) -> TrainingRunner:
    needed = _NEEDED_FOR_JOBS if settings.finetuner_job_template else _NEEDED
    if missing := [name for name in needed if not find_spec(name)]:
        extra = "kube" if settings.finetuner_job_template else "finetune"
        raise StartupError(f"{', '.join(missing)} missing: {pip_install(extra)}")
    if not settings.finetuner_job_template:
        return ChildRunner(settings)
    # Imported here: Kubernetes' client takes a second and 60 MB.
    from services.finetuner.cluster.runner import KubernetesRunner

    return await KubernetesRunner.open(settings)


@dataclass(frozen=True, slots=True)
class Finetuner:
    """The tasks of a fine-tuner; each runs until it is cancelled or `stop` is set."""

    store: TuningStore
    runner: TrainingRunner
    settings: FinetunerSettings
    metrics: FinetunerMetrics
    owner: str
    stop: asyncio.Event
    lease_s: float
    appeared: asyncio.Event = field(default_factory=asyncio.Event)

    async def appear(self) -> None:
        """Say again and again what can be trained here."""
        installed = ["none", "nf4"] if find_spec("bitsandbytes") else ["none"]
        quantizations = list(self.settings.finetuner_quantizations) or installed
        presence = Presence(models=sorted(self.settings.finetuner_models), quantizations=quantizations)
        while True:
            await self.store.appear(self.owner, presence)
            self.appeared.set()
            await asyncio.sleep(_APPEAR_S)

    async def work(self) -> None:
        """Run jobs, one at a time."""
        while not self.stop.is_set():
            claim = await self.store.claim(self.owner, self.lease_s, ["train"])
            if claim is None:
                await wait_for_event(self.stop, _LOOK_S)
                continue
            await self._run(claim)

    async def _run(self, claim: TuningClaim) -> None:
        try:
            run = JobRun(claim, self.store, self.runner, self.settings, self.metrics, self.stop, self.lease_s)
            await run.run()
        except LostClaimError:
            log.info("%s: cancelled, or taken over", claim.member)
            await self.runner.sweep(self._wanted)
        except Exception as error:  # a bug
            log.exception("%s: given up for now", claim.member)
            with contextlib.suppress(LostClaimError):
                await self.store.fault(claim, error, self.lease_s)

    async def sweep_loop(self) -> None:
        """End trainings that are left from jobs which ended or paused while no fine-tuner had them."""
        while True:
            await self.runner.sweep(self._wanted)
            await asyncio.sleep(_SWEEP_S)

    async def _wanted(self, member: str) -> bool:
        job = await self.store.load(member)
        return job is not None and job.stage == "train" and job.status in ("queued", "running")


def main() -> None:
    """Entry point of ``python -m services.finetuner``."""
    run_service("finetuner", FinetunerSettings, serve)
