"""Runs a claimed job: its files to disk, its training in a process, its words to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.fine_tuning.records import Checkpoint, Event, JobError, Order, Status
from services.common.fine_tuning.store import Claim, JobStore, new_event, new_id
from services.common.lifeline import PARENT_VARIABLE
from services.common.redis_client import Argument
from services.common.tasks import end_tasks
from services.finetuner.base import BaseError, base_folder
from services.finetuner.settings import FinetunerSettings
from services.finetuner.training.words import REFUSED

log = logging.getLogger(__name__)

_REPORT_S = 0.5
_MOST_EVENTS = 500  # about so many steps of a job are events
_PAUSE_S = 1.0  # before training that ended is started again


class JobRun:
    """One job, from where its last checkpoint stands. A paused job ends with a checkpoint, a cancelled one at once."""

    def __init__(self, claim: Claim, store: JobStore, settings: FinetunerSettings, stop: asyncio.Event) -> None:
        self._claim, self._store, self._settings, self._stop = claim, store, settings, stop
        self._events: list[Event] = []
        self._checkpoints: list[Checkpoint] = []
        self._fields: dict[str, Argument] = {}
        self._step = 0
        self._refusal = ""  # why the training will not begin again
        self._result = ""

    async def run(self) -> None:
        """Run until the job ends, is paused or given back; raises :class:`LostClaimError`."""
        job = await self._store.load(self._claim.member)
        if job is None:
            return
        folder = Path(self._settings.finetuner_folder)
        try:
            await self._prepare(job.order, folder / "jobs" / job.order.id)
            base = await self._while_renewing(base_folder(self._source(job.order), folder / "bases"))
            await self._train(folder / "jobs" / job.order.id, base)
        except BaseError as error:
            await self._fail(JobError(code="base_unavailable", message=f"`{job.order.model}`: {error}", param="model"))

    def _source(self, order: Order) -> str:
        source = self._settings.finetuner_models.get(order.model)
        if source is None:
            raise BaseError("this fine-tuner does not have it (RYZANSTEIN_FINETUNER_MODELS)")
        return source

    async def _prepare(self, order: Order, folder: Path) -> None:
        """Write the job and its files, as they were when it was created."""
        contents = {"job.json": order.model_dump_json().encode()}
        for name, file_id in (("training", order.training_file), ("validation", order.validation_file)):
            if file_id:
                contents[f"{name}.jsonl"] = await self._store.file(order.tenant, file_id)
        await asyncio.to_thread(_write, folder, contents)

    async def _while_renewing(self, work: Any) -> Path:
        """Await `work`, and keep the claim meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_REPORT_S)
                await self._store.report(self._claim, self._settings.finetuner_lease_s)
            found: Path = task.result()
            return found
        finally:
            await end_tasks([task])

    async def _train(self, folder: Path, base: Path) -> None:
        attempts, last = 0, -1
        while True:
            attempts = 1 if self._step > last else attempts + 1
            last = self._step
            status, code, said = await self._run_process(folder, base)
            if self._result:
                self._fields |= {"stage": "publish", "result": self._result}
                await self._store.report(self._claim, 0, self._events, self._checkpoints, self._fields)
                return
            if code != REFUSED and (status != "running" or self._stop.is_set()):
                await self._store.report(self._claim, 0, self._events, self._checkpoints, self._fields)
                return
            if code == REFUSED:
                await self._fail(JobError(code="invalid_training_file", message=self._refusal, param="training_file"))
                return
            if attempts >= self._settings.finetuner_attempts:
                message = f"Training ended {attempts} times without progress (status {code}): {said}"
                await self._fail(JobError(code="training_failed", message=message))
                return
            self._events.append(
                new_event(f"Training ended (status {code}) and goes on from its last checkpoint.", "warn")
            )
            await asyncio.sleep(_PAUSE_S)

    async def _fail(self, error: JobError) -> None:
        events = [*self._events, new_event(error.message, "error")]
        await self._store.end(self._claim, "failed", events, {**self._fields, "error": error.model_dump_json()})

    async def _run_process(self, folder: Path, base: Path) -> tuple[Status, int, str]:
        """Run the training process; returns the job's status, the exit status and the last words on stderr."""
        settings = self._settings
        limits = (
            settings.finetuner_checkpoint_s,
            settings.finetuner_max_tokens,
            settings.finetuner_threads,
            settings.finetuner_nice,
        )
        command = (sys.executable, "-m", "services.finetuner.training", str(folder), str(base), *map(str, limits))
        with (folder / "training.log").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
        assert process.stdout is not None
        hearing = asyncio.create_task(self._hear(process.stdout))
        status: Status = "running"
        try:
            while not hearing.done():
                await asyncio.wait([hearing], timeout=_REPORT_S)
                status = await self._tell()
                if status != "running" or self._stop.is_set():
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
            hearing.result()
            return status, await process.wait(), _last_line(folder / "training.log")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it has ended, unless the claim is lost
            await end_tasks([hearing])
            await process.wait()

    async def _tell(self) -> Status:
        """Send what was heard; returns the job's status. Raises :class:`LostClaimError`."""
        events, checkpoints, fields = self._events, self._checkpoints, self._fields
        self._events, self._checkpoints, self._fields = [], [], {}
        return await self._store.report(self._claim, self._settings.finetuner_lease_s, events, checkpoints, fields)

    async def _hear(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self._take(json.loads(line))

    def _take(self, word: dict[str, Any]) -> None:
        """Take one word of the training process; `training.words` says what they are."""
        match word.pop("kind"):
            case "begins":
                self._fields |= {"steps": word["steps"]}
                self._events.append(new_event(word["message"]))
            case "step":
                self._step = word["step"]
                left = int(time.time() + word["left_s"])
                self._fields |= {"step": self._step, "trained_tokens": word["tokens"], "estimated_finish": left}
                if self._step % max(1, word["of"] // _MOST_EVENTS) == 0 or self._step == word["of"]:
                    message = f"Step {word['step']}/{word['of']}: training loss={word['train_loss']:.4f}"
                    self._events.append(new_event(message, data=word))
            case "validated":
                message = f"Step {word['step']}/{word['of']}: validation loss={word['valid_loss']:.4f}"
                self._events.append(new_event(message, data=word))
            case "saved":
                self._checkpoints.append(Checkpoint(id=new_id("ftckpt_"), created_at=int(time.time()), **word))
            case "refused":
                self._refusal = word["message"]
            case "done":
                self._result = json.dumps(word)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files; those that were deleted in Redis are here, if the job was begun before. Raises BaseError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if content:
            (folder / name).write_bytes(content)
        elif not (folder / name).exists():
            raise BaseError(f"{name} was deleted before the training began")
