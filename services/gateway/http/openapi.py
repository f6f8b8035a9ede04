"""Makes the OpenAPI document: FastAPI's routes, and the hot routes from their msgspec structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.api.ignored import Unserved
from services.gateway.http.documentation import HEALTH, Documentation

_ERROR = {
    "description": "Refused or failed; the message names the field and what is allowed",
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/Error"},
            "example": {
                "error": {
                    "message": "Invalid value for `temperature`: expected `float` >= 0.0.",
                    "type": "invalid_request_error",
                    "param": "temperature",
                    "code": "invalid_value",
                }
            },
        }
    },
}
_STREAMS = {  # how each stream ends
    "generation": "data: {...}\n\ndata: [DONE]\n\n",
    "messages": "event: message_start\ndata: {...}\n\n",
    "responses": "event: response.completed\ndata: {...}\n\n",
}
_SECURITY: list[dict[str, list[str]]] = [{}, {"key": []}, {"x-api-key": []}]  # a key is required only with tenancy
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
        "usage": {"type": "object", "description": "What was generated before the failure"},
    },
}

_MESSAGES_ERROR = {
    "description": "Refused or failed; the message names the field and what is allowed",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/MessagesError"}}},
}
_MESSAGES_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "properties": {
                        "error_code": {"type": ["string", "null"]},
                        "param": {"type": ["string", "null"]},
                        "usage": {"type": "object", "description": "What was generated before the failure"},
                    },
                },
            },
        },
        "request_id": {"type": "string"},
    },
}
_UNSERVED_SCHEMA = {
    "type": "object",
    "description": "A part of any other type: left out of a history, else refused",
    "required": ["type"],
    "properties": {"type": {"type": "string"}},
}
_CODES = ("400", "401", "402", "403", "404", "405", "408", "413", "415", "429", "500", "503", "504")
_UPLOAD = {
    "summary": "Store a file of requests or training examples, one JSON object per line",
    "tags": ["batches"],
    "security": _SECURITY,
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch", "fine-tune"]},
                    },
                }
            }
        },
    },
    "responses": {
        "200": {"description": "The file", "content": {"application/json": {"schema": {"type": "object"}}}},
        **dict.fromkeys(_CODES, _ERROR),
    },
}


def document(app: FastAPI, documented: Mapping[str, Documentation]) -> dict[str, Any]:
    """The whole document; `documented` are the hot routes, by path."""
    description = "OpenAI-compatible serving whose token streams outlive their workers."
    whole = get_openapi(title=app.title, version="1.0.0", description=description, routes=app.routes)
    bodies = [route.body for route in documented.values()]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for component in components.values():
        component.pop("additionalProperties", None)  # unknown fields are left out
    _open_unions(components)
    declared = whole.setdefault("components", {})
    declared.setdefault("schemas", {}).update(components, Error=_ERROR_SCHEMA, MessagesError=_MESSAGES_ERROR_SCHEMA)
    declared["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    _document_errors(whole)
    for (path, route), schema in zip(documented.items(), schemas, strict=True):
        whole["paths"].setdefault(path, {})["post"] = _operation(route, schema)
    if "/v1/files" in whole["paths"]:
        whole["paths"]["/v1/files"]["post"] = _UPLOAD
    return whole


def _open_unions(components: dict[str, Any]) -> None:
    """Say of the unions that take objects of any type that they do."""
    if Unserved.__name__ in components:
        components[Unserved.__name__] = _UNSERVED_SCHEMA
    waiting: list[Any] = list(components.values())
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            if Unserved.__struct_config__.tag in schema.get("discriminator", {}).get("mapping", ()):
                del schema["discriminator"]
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema


def _document_errors(whole: dict[str, Any]) -> None:
    """Replace FastAPI's validation errors, which cannot occur here, by the gateway's errors."""
    for name in ("HTTPValidationError", "ValidationError"):
        whole["components"]["schemas"].pop(name, None)
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            tag = operation["tags"]
            if tag != [HEALTH]:
                operation["security"] = _SECURITY
                operation["responses"] |= dict.fromkeys(_codes_of(path, tag), _ERROR)


def _codes_of(path: str, tags: list[str]) -> tuple[str, ...]:
    if path == "/admin/workers":
        return ("401", "403", "503")
    return (
        ("400", "401", "403", "404", "503")
        if tags in (["batches"], ["fine-tuning"], ["responses"], ["usage"])
        else ("401", "404", "503")
    )


def _operation(route: Documentation, schema: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}, "example": route.answer}}
    if route.tag in _STREAMS and "`stream`" in route.summary:
        content["text/event-stream"] = {"example": _STREAMS[route.tag]}
    accepted = {"application/json": {"schema": schema, "example": route.example}}
    error = _MESSAGES_ERROR if route.tag == "messages" else _ERROR
    return {
        "summary": route.summary,
        "tags": [route.tag],
        "security": _SECURITY,
        "requestBody": {"required": True, "content": accepted},
        "responses": {"200": {"description": "The answer", "content": content}, **dict.fromkeys(_CODES, error)},
    }
