"""/v1/fine_tuning/jobs: a file of conversations becomes an adapter that is served."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import FastAPI, Query, Request, Response

from services.common.extras import pip_install
from services.common.fine_tuning.records import Order, Presence, Status, kept_checkpoints
from services.common.fine_tuning.store import Job, TuningStore, new_id
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import FineTuningBody, Hyperparameters
from services.gateway.batches.file_routes import as_json
from services.gateway.batches.files import FileStore
from services.gateway.errors import ApiError, invalid, storage_away
from services.gateway.fine_tuning.objects import as_object, checkpoint_object, event_object
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.http.documentation import Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.http.identified import CallingTenant
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.tenants.tenant import Tenant

_INSTALL = (
    f"No fine-tuner runs in this installation: {pip_install('finetune')}, then `ryzanstein up --fine-tuning "
    "DIR`, or `python -m services.finetuner` for services that were started otherwise."
)
_RANK = 16
_METADATA = "`null`: only jobs without metadata; `metadata[KEY]=VALUE`, several times: only jobs with all of these"
_NAMED = re.compile(r"metadata\[(?P<key>.+)\]", re.DOTALL)
PATH = "/v1/fine_tuning/jobs"
_TAGS: list[str | Enum] = ["fine-tuning"]
_UNFINISHED: tuple[Status, ...] = ("validating_files", "queued", "running", "paused")
DOCUMENTED = Documentation(
    summary="Train a LoRA adapter on a file of conversations, and serve it",
    tag="fine-tuning",
    body=FineTuningBody,
    example={"model": "smollm2-135m-instruct", "training_file": "file-0d6f8f2c9b1e4a57", "suffix": "pirate"},
    answer={
        "id": "ftjob-0d6f8f2c9b1e4a57",
        "object": "fine_tuning.job",
        "model": "smollm2-135m-instruct",
        "status": "validating_files",
        "training_file": "file-0d6f8f2c9b1e4a57",
        "created_at": 1767225600,
        "fine_tuned_model": None,
    },
)


class _Identified(Protocol):
    id: str


One = TypeVar("One", bound=_Identified)


class FineTuningHandler:
    """POST /v1/fine_tuning/jobs."""

    def __init__(
        self,
        store: TuningStore,
        files: FileStore,
        credential: Callable[[str], Awaitable[str]],
        on_new: Callable[[], None],
    ) -> None:
        """`credential` derives what is stored from an Authorization header; `on_new` is called for each new job."""
        self._store, self._files, self._credential, self._on_new = store, files, credential, on_new
        self.decode = BodyDecoder(FineTuningBody).decode

    async def answer(self, exchange: Exchange, body: FineTuningBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        tenant = request.tenant
        if not tenant.admin:
            message = "This needs an administrator's key: the result is served to all keys."
            raise ApiError(403, message, "permission_error", code="forbidden")
        try:
            order = await self._order(tenant, body, await self._credential(exchange.authorization))
            if not await self._store.create(order):
                message = "You have too many open fine-tuning jobs."
                raise ApiError(429, message, "fine_tuning", code="too_many_jobs", retry_after_s=60)
            job = await self._store.get(tenant.name, order.id)
        except RedisAwayError as error:
            raise storage_away() from error
        self._on_new()
        await exchange.send_json(200, as_object(_existing(job, order.id)), list(request.admission.headers))

    async def _order(self, tenant: Tenant, body: FineTuningBody, credential: str) -> Order:
        hyper = hyperparameters(body)
        check_trainable(await self._store.present(), body.model, hyper.quantization or "none")
        for field, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file)):
            if file_id is not None:
                await self._check_file(tenant.name, field, file_id)
        return Order(
            id=new_id("ftjob-"),
            tenant=tenant.name,
            model=body.model,
            training_file=body.training_file,
            validation_file=body.validation_file,
            suffix=body.suffix,
            seed=random.SystemRandom().getrandbits(31) if body.seed is None else body.seed,
            n_epochs=hyper.n_epochs or "auto",
            batch_size=hyper.batch_size or "auto",
            learning_rate_multiplier=hyper.learning_rate_multiplier or "auto",
            lora_rank=hyper.lora_rank or _RANK,
            quantization=hyper.quantization or "none",
            metadata=body.metadata,
            credential=credential,
            created_at=int(time.time()),
            key_id=tenant.key_id,
        )

    async def _check_file(self, tenant: str, field: str, file_id: str) -> None:
        try:
            file = await self._files.get(tenant, file_id)
        except ApiError as error:
            raise invalid(f"`{field}`: {error.message}", field, "invalid_file") from error
        if file.purpose != "fine-tune":
            message = f"`{field}`: the file {file.id} has the purpose `{file.purpose}`; `fine-tune` is needed."
            raise invalid(message, field, "invalid_file")


def hyperparameters(body: FineTuningBody) -> Hyperparameters:
    """The hyperparameters of a body, which OpenAI takes in two places; raises :class:`ApiError` (400)."""
    given = body.method.supervised.hyperparameters if body.method and body.method.supervised else None
    if given and body.hyperparameters:
        raise invalid("`hyperparameters` and `method`: give one of them.", "hyperparameters")
    return given or body.hyperparameters or Hyperparameters()


def check_trainable(present: Sequence[Presence], model: str, quantization: str) -> None:
    """Raise :class:`ApiError` unless a fine-tuner is there that can train the model so."""
    if not present:
        raise ApiError(503, _INSTALL, "service_unavailable_error", code="fine_tuning_unavailable")
    able = [one for one in present if model in one.models]
    if not able:
        known = ", ".join(sorted({f"`{name}`" for one in present for name in one.models})) or "none"
        raise invalid(
            f"`model`: `{model}` cannot be fine-tuned; expected one of {known}.", "model", "model_not_available"
        )
    if not any(quantization in one.quantizations for one in able):
        param = "method.supervised.hyperparameters.quantization"
        raise invalid(f"`{param}`: `{quantization}` needs the package bitsandbytes where the fine-tuner runs.", param)


def wanted_metadata(query: Sequence[tuple[str, str]]) -> dict[str, str] | None:
    """The metadata that a query asks for: none at all if it is empty, any if None; raises :class:`ApiError` (400)."""
    wanted: dict[str, str] | None = None
    for name, value in query:
        if name.partition("[")[0] != "metadata":
            continue
        named = _NAMED.fullmatch(name)
        if named is None and (name != "metadata" or value not in ("", "null")):
            message = "`metadata`: expected `metadata[KEY]=VALUE`, or `metadata=null` for jobs without metadata."
            raise invalid(message, "metadata", "invalid_value")
        wanted = (wanted or {}) | ({named["key"]: value} if named else {})
    return wanted


def has_metadata(job: Job, wanted: dict[str, str] | None) -> bool:
    """Whether a job has the wanted metadata."""
    if wanted is None:
        return True
    own = job.order.metadata or {}
    return wanted.items() <= own.items() if wanted else not own


def _existing(job: Job | None, job_id: str) -> Job:
    if job is None:
        message = f"Could not find fine tune: {job_id}"
        raise ApiError(404, message, "invalid_request_error", "fine_tuning_job_id", "fine_tune_not_found")
    return job


def _page(items: Sequence[One], after: str, limit: int, written: Callable[[One], Any]) -> Response:
    """A page of a list, which begins behind the id `after`."""
    ids = [one.id for one in items]
    rest = items[ids.index(after) + 1 :] if after in ids else (items if not after else [])
    shown = [written(one) for one in rest[:limit]]
    ends = (
        {"first_id": rest[0].id, "last_id": rest[len(shown) - 1].id} if shown else {"first_id": None, "last_id": None}
    )
    return as_json({"object": "list", "data": shown, "has_more": len(rest) > limit, **ends})


After = Annotated[str, Query(max_length=64, description="An id: only entries behind it in the order")]


def add_fine_tuning(app: FastAPI, store: TuningStore) -> None:
    """Add all routes except the creation of a job."""
    _add_jobs(app, store)
    _add_turns(app, store)
    _add_logs(app, store)


def _add_jobs(app: FastAPI, store: TuningStore) -> None:
    @app.get(PATH, summary="Your fine-tuning jobs, the latest first", tags=_TAGS)
    async def jobs(
        request: Request,
        tenant: CallingTenant,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        metadata: Annotated[str | None, Query(description=_METADATA)] = None,  # for the document
    ) -> Response:
        wanted = wanted_metadata(request.query_params.multi_items())
        chosen: list[Job] = []
        for job_id in [one for one in await store.ids(tenant.name) if not after or one < after]:
            if len(chosen) > limit:
                break
            job = await store.get(tenant.name, job_id)
            if job and has_metadata(job, wanted):
                chosen.append(job)
        return _page([as_object(job) for job in chosen], "", limit, lambda job: job)

    @app.get(PATH + "/{job_id}", summary="One fine-tuning job", tags=_TAGS)
    async def job(job_id: str, tenant: CallingTenant) -> Response:
        return as_json(as_object(_existing(await store.get(tenant.name, job_id), job_id)))


def _add_turns(app: FastAPI, store: TuningStore) -> None:
    async def turn(tenant: Tenant, job_id: str, status: Status, allowed: Sequence[Status], verb: str) -> Response:
        turned = await store.turn(tenant.name, job_id, status, allowed)
        job = _existing(await store.get(tenant.name, job_id), job_id)
        if not turned:
            raise invalid(f"A job with the status `{job.status}` cannot be {verb}.", None, "invalid_status")
        return as_json(as_object(job))

    @app.post(PATH + "/{job_id}/cancel", summary="End a fine-tuning job", tags=_TAGS)
    async def cancel(job_id: str, tenant: CallingTenant) -> Response:
        return await turn(tenant, job_id, "cancelled", _UNFINISHED, "cancelled")

    @app.post(PATH + "/{job_id}/pause", summary="Stop training after a checkpoint, until it is resumed", tags=_TAGS)
    async def pause(job_id: str, tenant: CallingTenant) -> Response:
        return await turn(tenant, job_id, "paused", ("queued", "running"), "paused")

    @app.post(PATH + "/{job_id}/resume", summary="Go on with a paused job from its last checkpoint", tags=_TAGS)
    async def resume(job_id: str, tenant: CallingTenant) -> Response:
        return await turn(tenant, job_id, "queued", ("paused",), "resumed")


def _add_logs(app: FastAPI, store: TuningStore) -> None:
    @app.get(PATH + "/{job_id}/events", summary="A job's events, the latest first", tags=_TAGS)
    async def events(
        job_id: str, tenant: CallingTenant, after: After = "", limit: Annotated[int, Query(ge=1, le=1000)] = 20
    ) -> Response:
        _existing(await store.get(tenant.name, job_id), job_id)
        return _page((await store.events(tenant.name, job_id))[::-1], after, limit, event_object)

    @app.get(PATH + "/{job_id}/checkpoints", summary="A job's last three checkpoints, the latest first", tags=_TAGS)
    async def checkpoints(
        job_id: str, tenant: CallingTenant, after: After = "", limit: Annotated[int, Query(ge=1, le=100)] = 10
    ) -> Response:
        job = _existing(await store.get(tenant.name, job_id), job_id)
        saved = kept_checkpoints(await store.checkpoints(tenant.name, job_id))[::-1]
        return _page(saved, after, limit, lambda one: checkpoint_object(job, one))
