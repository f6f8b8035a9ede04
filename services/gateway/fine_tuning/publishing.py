"""Serves what a job has trained, and computes its loss on the validation file through the serving workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.common.fine_tuning.records import Event, Example, Result, kept_checkpoints
from services.common.fine_tuning.store import Job, TuningStore
from services.gateway.asgi import ASGIApp
from services.gateway.batches.files import FileStore
from services.gateway.batches.requests import answer_of
from services.gateway.errors import unavailable
from services.gateway.fine_tuning.objects import checkpoint_name
from services.gateway.http.adapters import AdapterAdmin, LoadBody
from services.gateway.ids import new_id

_COLUMNS = ("step", "train_loss", "valid_loss")


class ValidationRefusedError(Exception):
    """A request of the validation was refused."""


class Publisher:
    """Makes an adapter a model name."""

    def __init__(self, store: TuningStore, files: FileStore, admin: AdapterAdmin, routes: ASGIApp) -> None:
        """`routes` take the requests of the validation."""
        self._store, self._files, self._admin, self._routes = store, files, admin, routes

    async def serve(self, job: Job, result: Result) -> None:
        """Load the adapter and its checkpoints; raises :class:`ApiError`."""
        order = job.order
        saved = kept_checkpoints(await self._store.checkpoints(order.tenant, order.id))
        names = [(checkpoint_name(job, checkpoint), checkpoint.folder) for checkpoint in saved]
        names.append((order.served_name, result.folder))
        for name, folder in names:
            # In place: a gateway that ended between loading and its report has loaded it before.
            await self._admin.load(
                LoadBody(lora_name=name, lora_path=folder, load_inplace=True, base_model_name=order.model)
            )

    async def served_loss(self, job: Job, examples: Sequence[Example]) -> float:
        """The mean loss of the trained tokens; raises :class:`ApiError` when a request fails.

        Raises :class:`ValidationRefusedError` when the key that created the job may not use its result.
        """
        total, count = 0.0, 0
        for example in examples:
            scored = await self._scored(job, example.tokens)
            for at in (at for begin, end in example.trained for at in range(max(begin, 1), end)):
                total -= scored[at][str(example.tokens[at])]["logprob"]
                count += 1
        return total / count

    async def _scored(self, job: Job, tokens: Sequence[int]) -> list[Any]:
        body = {
            "model": job.order.served_name, "prompt": tokens, "max_tokens": 0, "prompt_logprobs": 0,
            "add_special_tokens": False,
        }  # fmt: skip
        request = msgspec.json.encode(body)
        answer = await answer_of(self._routes, "/v1/completions", job.order.credential, new_id("req"), request)
        if not answer.ok:
            message = answer.body.decode(errors="replace")
            raise (
                unavailable(f"The adapter is loaded and does not answer: {message}")
                if answer.later
                else ValidationRefusedError(message)
            )
        scores: list[Any] = msgspec.json.decode(answer.body)["choices"][0]["prompt_logprobs"]
        return scores

    async def write_results(self, job: Job, events: Sequence[Event]) -> str:
        """Write a table of losses by step as a file; returns its id. Raises :class:`ApiError`."""
        rows: dict[int, dict[str, Any]] = {}
        for event in events:
            if event.data and "step" in event.data:
                rows.setdefault(event.data["step"], {}).update(event.data)
        lines = [",".join(_COLUMNS), *(",".join(str(row.get(name, "")) for name in _COLUMNS) for row in rows.values())]
        upload = self._files.begin(job.order.tenant)
        await upload.write(("\n".join(lines) + "\n").encode())
        return (await upload.publish(f"{job.order.id}_results.csv", None, "fine-tune-results")).id
