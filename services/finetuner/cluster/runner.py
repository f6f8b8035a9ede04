"""Trainings as Kubernetes Jobs, made from a template. They outlive the fine-tuner; the next fine-tuner follows them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.common.lifecycle import StartupError
from services.finetuner.cluster.api import Cluster, ClusterAwayError, ClusterError, Object
from services.finetuner.cluster.job import MEMBER, build, ended, outcome, runs, selector, waiting
from services.finetuner.cluster.journal import Journal
from services.finetuner.runner import NotStartedError, TrainingMessage, TrainingOutcome, TrainingTask
from services.finetuner.settings import FinetunerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 1.0
_AGAIN_S = 2.0  # between tries while the API server is away


async def _patiently(call: Callable[[], T]) -> T:
    """Make a call in a thread until the API server answers; raises :class:`ClusterError`."""
    while True:
        try:
            return await asyncio.to_thread(call)
        except ClusterAwayError as error:
            log.warning("%s", error)
            await asyncio.sleep(_AGAIN_S)


class KubernetesRun:
    """See :class:`TrainingRun`."""

    def __init__(self, cluster: Cluster, wanted: Object, task: TrainingTask) -> None:
        """`wanted` is the Kubernetes Job to create, unless there is one of its name."""
        self._cluster, self._wanted, self._task = cluster, wanted, task
        self._name = str(wanted["metadata"]["name"])
        self._stopping = asyncio.Event()
        self._uid, self._offset = "", 0
        self._outcome = TrainingOutcome(-1, "its Kubernetes Job was deleted", counts=False)

    @property
    def offset(self) -> str:
        """See :class:`TrainingRun`."""
        return f"{self._uid}:{self._offset}"

    async def messages(self) -> AsyncIterator[TrainingMessage]:
        """See :class:`TrainingRun`."""
        try:
            if not await self._begin():
                return
            async for message in self._follow():
                yield message
        except ClusterError as error:
            raise NotStartedError(str(error)) from error

    def stop(self) -> None:
        """See :class:`TrainingRun`."""
        self._stopping.set()

    async def outcome(self) -> TrainingOutcome:
        """See :class:`TrainingRun`."""
        return self._outcome

    async def _begin(self) -> bool:
        """Create the Job, or follow a running one; returns whether there is one.

        A Job that is being deleted has pods that still write checkpoints, so that another one waits for its end.
        """
        while not self._stopping.is_set():
            job = await _patiently(lambda: self._cluster.job(self._name))
            if job is None:
                job = await _patiently(lambda: self._cluster.create_job(self._wanted))
            elif "deletionTimestamp" in job["metadata"]:
                job = None
            if job is not None:
                self._uid = job["metadata"]["uid"]
                uid, _, offset = self._task.offset.rpartition(":")
                self._offset = int(offset) if uid == self._uid else 0
                await asyncio.to_thread(self._journal.begin)
                return True
            await self._wait()
        return False

    async def _follow(self) -> AsyncIterator[TrainingMessage]:
        announced, deleted = "", False
        while True:
            if self._stopping.is_set() and not deleted:
                await self._delete()
                deleted = True
            job = await _patiently(lambda: self._cluster.job(self._name))
            gone = job is None or job["metadata"]["uid"] != self._uid
            condition = None if gone or job is None or deleted else ended(job)
            if job is not None and not gone and not condition and not runs(job):
                pods = await _patiently(lambda: self._cluster.pods(self._name))
                if (reason := waiting(pods)) and reason != announced:
                    announced = reason
                    yield {"kind": "waits", "message": reason}
            # Asked for after the state: what a training said before its end is there.
            for message, offset in await asyncio.to_thread(self._journal.after, self._offset):
                self._offset = offset
                yield message
            if condition:
                pods = await _patiently(lambda: self._cluster.pods(self._name))
                self._outcome = outcome(condition, pods)
                await self._delete()
            if gone or condition:
                return
            await self._wait()

    async def _delete(self) -> None:
        await _patiently(lambda: self._cluster.delete_job(self._name))

    async def _wait(self) -> None:
        """Wait for the next look, or until the run is stopped."""
        if self._stopping.is_set():
            await asyncio.sleep(_LOOK_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._stopping.wait()

    @property
    def _journal(self) -> Journal:
        """Each Job has one, since what was said in an earlier one is reported."""
        return Journal(self._task.folder / "words" / f"{self._uid}.jsonl")


@dataclass(frozen=True, slots=True)
class KubernetesRunner:
    """See :class:`TrainingRunner`."""

    cluster: Cluster
    template: Object
    owner_uid: str
    settings: FinetunerSettings

    @classmethod
    async def open(cls, settings: FinetunerSettings) -> KubernetesRunner:
        """Read the template and ask for its owner; raises :class:`StartupError`."""
        path = Path(settings.finetuner_job_template)
        try:
            template = json.loads(await asyncio.to_thread(path.read_text))
            cluster = Cluster(template["metadata"]["namespace"])
            [owner] = template["metadata"]["ownerReferences"]
            uid = await _patiently(lambda: cluster.deployment_uid(owner["name"]))
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"RYZANSTEIN_FINETUNER_JOB_TEMPLATE is {path}: {error!r}") from error
        except ClusterError as error:
            raise StartupError(str(error)) from error
        return cls(cluster, template, uid, settings)

    @property
    def outlives(self) -> bool:
        """See :class:`TrainingRunner`."""
        return True

    @asynccontextmanager
    async def start(self, task: TrainingTask) -> AsyncIterator[KubernetesRun]:
        """See :class:`TrainingRunner`."""
        wanted = build(self.template, task, task.arguments(self.settings), self.owner_uid)
        yield KubernetesRun(self.cluster, wanted, task)

    async def sweep(self, wanted: Callable[[str], Awaitable[bool]]) -> None:
        """See :class:`TrainingRunner`."""
        try:
            for job in await _patiently(lambda: self.cluster.jobs(selector(self.template))):
                metadata = job["metadata"]
                if "deletionTimestamp" not in metadata and not await wanted(metadata["annotations"][MEMBER]):
                    log.info("%s is not wanted any more", metadata["name"])
                    await _patiently(partial(self.cluster.delete_job, metadata["name"]))
        except ClusterError as error:
            log.warning("Jobs that are not wanted any more stay: %s", error)
