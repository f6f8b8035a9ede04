"""GET /v1/models, in OpenAI's or Anthropic's shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from services.gateway.generation.models import ListedModel, Models
from services.gateway.http.identified import CallingTenant
from services.gateway.http.messages.endpoint import is_messages_client


def add_models(app: FastAPI, names: Models) -> None:
    """Add the routes of models to the app."""

    @app.get("/v1/models", summary="The models that requests may name: served now, or expected", tags=["models"])
    async def models(request: Request, tenant: CallingTenant) -> dict[str, Any]:
        listed = names.listed(tenant)
        if not is_messages_client(request.scope):
            return {"object": "list", "data": [_openai_model(model) for model in listed]}
        first, last = (listed[0].name, listed[-1].name) if listed else (None, None)
        ends = {"first_id": first, "last_id": last, "has_more": False}
        return {"data": [_anthropic_model(model) for model in listed], **ends}

    @app.get("/v1/models/{name:path}", summary="One model", tags=["models"])
    async def model(name: str, request: Request, tenant: CallingTenant) -> dict[str, Any]:
        listed = await names.get(name, tenant)
        return _anthropic_model(listed) if is_messages_client(request.scope) else _openai_model(listed)


def _openai_model(listed: ListedModel) -> dict[str, Any]:
    """A model in OpenAI's shape; a route has `targets`, its models."""
    model = listed.served
    facts: dict[str, Any] = {"created": model.card.created, "max_model_len": model.max_len} if model else {"created": 0}
    if model and not model.card.only_embeds:
        facts["resume"] = model.resume
    if listed.phase:
        facts["phase"] = listed.phase
    of: dict[str, Any] = {"targets": listed.targets} if listed.targets else {}
    if model and model.adapter and not of:
        of = {"parent": model.adapter.base, "root": model.adapter.source}
    return {"id": listed.name, "object": "model", "owned_by": "ryzanstein", **facts, **of}


def _anthropic_model(listed: ListedModel) -> dict[str, Any]:
    """A model in Anthropic's shape, which gives 1970 for an unknown time."""
    name, model = listed.name, listed.served
    created = datetime.fromtimestamp(model.card.created if model else 0, UTC)
    limits = {"max_input_tokens": model.max_len, "max_tokens": model.max_len} if model else {}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "lifecycle": "active",
        "created_at": created.isoformat().replace("+00:00", "Z"),
        **limits,
    }
