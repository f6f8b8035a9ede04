"""Runs a claimed job: writes its files to disk, has a runner train, reports the training's messages to Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from services.common.fine_tuning.records import Event, JobCheckpoint, JobError, Order, Status
from services.common.fine_tuning.store import TuningClaim, TuningStore, new_event, new_id
from services.common.redis_client import Argument
from services.common.tasks import end_tasks
from services.finetuner.metrics import FinetunerMetrics
from services.finetuner.runner import (
    NotStartedError,
    TrainingMessage,
    TrainingOutcome,
    TrainingRun,
    TrainingRunner,
    TrainingTask,
)
from services.finetuner.settings import FinetunerSettings

log = logging.getLogger(__name__)

LEASE_S = 10.0  # a fine-tuner that renews nothing for so long loses its job to another one
_REPORT_S = 0.5
_MOST_EVENTS = 500  # about the number of a job's steps that become events
_PAUSE_S = 1.0  # before training that ended is started again


class UnpreparedError(Exception):
    """The training cannot begin; the message is for the user."""

    def __init__(self, code: str, param: str, message: str) -> None:
        super().__init__(message)
        self.error = JobError(code=code, param=param, message=message)


class JobRun:
    """Runs one job from its last checkpoint on. A paused job ends with a checkpoint, a cancelled job at once."""

    def __init__(
        self, claim: TuningClaim, store: TuningStore, runner: TrainingRunner, settings: FinetunerSettings,
        metrics: FinetunerMetrics, stop: asyncio.Event, lease_s: float,
    ) -> None:  # fmt: skip
        self._lease_s = lease_s
        self._claim, self._store, self._runner, self._settings = claim, store, runner, settings
        self._metrics, self._stop = metrics, stop
        self._events: list[Event] = []
        self._checkpoints: list[JobCheckpoint] = []
        self._fields: dict[str, Argument] = {}
        self._step = 0
        self._refusal: JobError | None = None  # why the training will not begin again
        self._result = ""

    async def run(self) -> None:
        """Run until the job ends, is paused or given back; raises :class:`LostClaimError`."""
        order = self._claim.job.order
        folder = Path(self._settings.finetuner_folder) / "jobs" / order.id
        try:
            source = self._source(order)
            await self._prepare(order, folder)
        except UnpreparedError as error:
            await self._fail(error.error)
            return
        await self._train(TrainingTask(self._claim.member, order.id, folder, source, self._claim.job.heard))

    def _source(self, order: Order) -> str:
        source = self._settings.finetuner_models.get(order.model)
        if source is None:
            message = f"`{order.model}`: this fine-tuner does not have it (RYZANSTEIN_FINETUNER_MODELS)"
            raise UnpreparedError("base_unavailable", "model", message)
        return source

    async def _prepare(self, order: Order, folder: Path) -> None:
        """Write the job and its files, as they were when it was created."""
        contents = {"job.json": order.model_dump_json().encode()}
        for name, file_id in (("training", order.training_file), ("validation", order.validation_file)):
            if file_id:
                contents[f"{name}.jsonl"] = await self._store.file(order.tenant, file_id)
        await asyncio.to_thread(_write, folder, contents)

    async def _train(self, task: TrainingTask) -> None:
        attempts = 0  # since the last step
        while True:
            before = self._step
            try:
                status, outcome = await self._run_once(task)
            except NotStartedError as error:
                await self._fail(JobError(code="training_not_started", message=f"Training was not started: {error}"))
                return
            if self._result:
                self._fields |= {"stage": "publish", "result": self._result}
            if self._result or outcome is None or (not self._refusal and (status != "running" or self._stop.is_set())):
                await self._store.report(self._claim, 0, self._events, self._checkpoints, self._fields)
                return
            if self._refusal:
                await self._fail(self._refusal)
                return
            attempts = 0 if self._step > before else attempts + outcome.counts
            if attempts >= self._settings.finetuner_attempts:
                message = (
                    f"Training ended {attempts} times without progress (status {outcome.status}): {outcome.reason}"
                )
                await self._fail(JobError(code="training_failed", message=message))
                return
            message = (
                f"Training ended (status {outcome.status}: {outcome.reason}) and goes on from its last checkpoint."
            )
            self._events.append(new_event(message, "warn"))
            await asyncio.sleep(_PAUSE_S)

    async def _fail(self, error: JobError) -> None:
        events = [*self._events, new_event(error.message, "error")]
        await self._store.end(self._claim, "failed", events, {**self._fields, "error": error.model_dump_json()})
        self._metrics.failures.labels(error.code).inc()

    async def _run_once(self, task: TrainingTask) -> tuple[Status, TrainingOutcome | None]:
        """Run a training; returns the job's status, and how the training ended, if it does not outlive this process."""
        async with self._runner.start(task) as run:
            consuming = asyncio.create_task(self._consume(run))
            status: Status = "running"
            try:
                while not consuming.done():
                    await asyncio.wait([consuming], timeout=_REPORT_S)
                    status = await self._report()
                    if status != "running" or (self._stop.is_set() and not self._runner.outlives):
                        run.stop()
                    elif self._stop.is_set():
                        return status, None
                consuming.result()
                return status, await run.outcome()
            finally:
                await end_tasks([consuming])

    async def _report(self) -> Status:
        """Report the messages since the last report; returns the job's status. Raises :class:`LostClaimError`."""
        events, checkpoints, fields = self._events, self._checkpoints, self._fields
        self._events, self._checkpoints, self._fields = [], [], {}
        return await self._store.report(self._claim, self._lease_s, events, checkpoints, fields)

    async def _consume(self, run: TrainingRun) -> None:
        async for message in run.messages():
            self._apply(message)
            self._fields["heard"] = run.offset

    def _apply(self, message: TrainingMessage) -> None:
        """Take one message of the training (see `training.messages`), or `waits` with a message of the runner."""
        fields = dict(message)
        match fields.pop("kind"):
            case "begins":
                self._fields |= {"steps": fields["steps"]}
                self._events.append(new_event(fields["message"]))
            case "step":
                self._step = fields["step"]
                left = int(time.time() + fields["left_s"])
                self._fields |= {"step": self._step, "trained_tokens": fields["tokens"], "estimated_finish": left}
                if self._step % max(1, fields["of"] // _MOST_EVENTS) == 0 or self._step == fields["of"]:
                    text = f"Step {fields['step']}/{fields['of']}: training loss={fields['train_loss']:.4f}"
                    self._events.append(new_event(text, data=fields))
            case "validated":
                text = f"Step {fields['step']}/{fields['of']}: validation loss={fields['valid_loss']:.4f}"
                self._events.append(new_event(text, data=fields))
            case "saved":
                self._checkpoints.append(JobCheckpoint(id=new_id("ftckpt_"), created_at=int(time.time()), **fields))
            case "waits":
                self._events.append(new_event(fields["message"], "warn"))
            case "refused":
                self._refusal = JobError(**fields)
            case "done":
                self._result = json.dumps(fields)


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files; files deleted in Redis are on disk if the job has begun before. Raises UnpreparedError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if content:
            (folder / name).write_bytes(content)
        elif not (folder / name).exists():
            message = f"{name} was deleted before the training began"
            raise UnpreparedError("invalid_training_file", "training_file", message)
