"""GET /v1/models, in OpenAI's or Anthropic's shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from services.gateway.generation.models import check_permission
from services.gateway.http.identified import CallingTenant
from services.gateway.http.messages.endpoint import is_messages_client
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog


def add_models(app: FastAPI, catalog: Catalog) -> None:
    """Add the routes of models to the app."""

    @app.get("/v1/models", summary="The models that requests may name: served now, or expected", tags=["models"])
    async def models(request: Request, tenant: CallingTenant) -> dict[str, Any]:
        listed = catalog.listed(tenant.models)
        if not is_messages_client(request.scope):
            return {"object": "list", "data": [_openai_model(name, model) for name, model in listed.items()]}
        ends = {"first_id": next(iter(listed), None), "last_id": next(reversed(listed), None), "has_more": False}
        return {"data": [_anthropic_model(name, model) for name, model in listed.items()], **ends}

    @app.get("/v1/models/{name:path}", summary="One model", tags=["models"])
    async def model(name: str, request: Request, tenant: CallingTenant) -> dict[str, Any]:
        check_permission(name, tenant)
        unknown = catalog.expects(name) and not catalog.knows(name)
        served = None if unknown else catalog.get(name, tenant.models)
        return _anthropic_model(name, served) if is_messages_client(request.scope) else _openai_model(name, served)


def _openai_model(name: str, model: ServedModel | None) -> dict[str, Any]:
    """A model in OpenAI's shape; `model` is None for one that no worker has served yet."""
    facts: dict[str, Any] = {"created": model.card.created, "max_model_len": model.max_len} if model else {"created": 0}
    if model and not model.card.only_embeds:
        facts["resume"] = model.resume
    of = {"parent": model.adapter.base, "root": model.adapter.source} if model and model.adapter else {}
    return {"id": name, "object": "model", "owned_by": "ryzanstein", **facts, **of}


def _anthropic_model(name: str, model: ServedModel | None) -> dict[str, Any]:
    """A model in Anthropic's shape, which gives 1970 for an unknown time."""
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
