"""The OpenAPI document: FastAPI's own routes, and the hot ones from their msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.api.schema import (
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from services.gateway.http.messages.schema import CountBody, MessagesBody
from services.gateway.http.responses.schema import ResponsesBody

_MODEL = "ryzanstein-tiny"
_RESPONSE = {
    "id": "resp_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e4",
    "object": "response",
    "created_at": 1767225600,
    "status": "completed",
    "model": _MODEL,
    "output": [
        {
            "id": "msg_0d6f8f2c9b1e4a57a3c1d2e40d6f8f2c9b1e4a57a3c1d2e40000",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Blue.", "annotations": [], "logprobs": []}],
        }
    ],
    "store": True,
    "usage": {"input_tokens": 12, "output_tokens": 3, "total_tokens": 15},
}
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
_STREAMS = {  # how they end
    "generation": "data: {...}\n\ndata: [DONE]\n\n",
    "messages": "event: message_start\ndata: {...}\n\n",
    "responses": "event: response.completed\ndata: {...}\n\n",
}
_SECURITY: list[dict[str, list[str]]] = [{}, {"key": []}, {"x-api-key": []}]  # a key is needed only with tenancy
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
_CODES = ("400", "401", "403", "404", "405", "408", "413", "415", "429", "500", "503")
_UPLOAD = {
    "summary": "Store a file of requests, one JSON object per line",
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
                        "purpose": {"type": "string", "enum": ["batch"]},
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

# path -> (summary, tag, body, example body, example answer)
_ROUTES: dict[str, tuple[str, str, type[msgspec.Struct], dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        "Continue a conversation; server-sent events with `stream`",
        "generation",
        ChatBody,
        {"model": _MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "max_completion_tokens": 32},
        {
            "id": "chatcmpl-0d6f8f2c9b1e4a57a3c1d2e4",
            "object": "chat.completion",
            "created": 1767225600,
            "model": _MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Blue.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 12,
                "completion_tokens": 3,
                "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    ),
    "/v1/responses": (
        "Answer a turn of a conversation that the gateway may keep; server-sent events with `stream`",
        "responses",
        ResponsesBody,
        {"model": _MODEL, "input": "Name a colour.", "max_output_tokens": 32},
        _RESPONSE,
    ),
    "/v1/completions": (
        "Continue a text; server-sent events with `stream`",
        "generation",
        CompletionBody,
        {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0},
        {
            "id": "cmpl-0d6f8f2c9b1e4a57a3c1d2e4",
            "object": "text_completion",
            "created": 1767225600,
            "model": _MODEL,
            "choices": [{"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20},
        },
    ),
    "/v1/messages": (
        "Continue a conversation, in Anthropic's form; server-sent events with `stream`",
        "messages",
        MessagesBody,
        {"model": _MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 32},
        {
            "id": "msg-0d6f8f2c9b1e4a57a3c1d2e4",
            "type": "message",
            "role": "assistant",
            "model": _MODEL,
            "content": [{"type": "text", "text": "Blue."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 12,
                "output_tokens": 3,
                "cache_creation_input_tokens": None,
                "cache_read_input_tokens": None,
            },
        },
    ),
    "/v1/messages/count_tokens": (
        "Tokens of a prompt, in Anthropic's form",
        "messages",
        CountBody,
        {"model": _MODEL, "messages": [{"role": "user", "content": "Name a colour."}]},
        {"input_tokens": 12},
    ),
    "/v1/embeddings": (
        "Embed texts or token ids",
        "embeddings",
        EmbeddingBody,
        {"model": _MODEL, "input": ["first text", "second text"]},
        {
            "object": "list",
            "model": _MODEL,
            "data": [{"object": "embedding", "index": 0, "embedding": [0.01, -0.02]}],
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        },
    ),
    "/v1/score": (
        "Likeness of texts, one with many or pair by pair; also at /score",
        "embeddings",
        ScoreBody,
        {"model": _MODEL, "text_1": "a list", "text_2": ["a tuple", "a file"]},
        {
            "id": "score-0d6f8f2c9b1e4a57a3c1d2e4",
            "object": "list",
            "created": 1767225600,
            "model": _MODEL,
            "data": [{"index": 0, "object": "score", "score": 0.9}, {"index": 1, "object": "score", "score": 0.4}],
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        },
    ),
    "/v1/rerank": (
        "Documents in the order of their likeness to a query; also at /rerank and /v2/rerank",
        "embeddings",
        RerankBody,
        {"model": _MODEL, "query": "a list", "documents": ["a file", "a tuple"], "top_n": 1},
        {
            "id": "rerank-0d6f8f2c9b1e4a57a3c1d2e4",
            "object": "list",
            "model": _MODEL,
            "results": [{"index": 1, "relevance_score": 0.9, "document": {"text": "a tuple"}}],
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
            "meta": {"tokens": {"input_tokens": 6, "output_tokens": 0}},
        },
    ),
    "/v1/batches": (
        "Answer all requests of a file when there is room for them",
        "batches",
        BatchBody,
        {"input_file_id": "file-0d6f8f2c9b1e4a57", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        {
            "id": "batch_0d6f8f2c9b1e4a57",
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-0d6f8f2c9b1e4a57",
            "completion_window": "24h",
            "status": "validating",
            "created_at": 1767225600,
            "expires_at": 1767312000,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        },
    ),
    "/tokenize": (
        "Token ids of a text or a conversation",
        "tokens",
        TokenizeBody,
        {"model": _MODEL, "prompt": "Hello"},
        {"count": 1, "max_model_len": 2048, "tokens": [9906], "token_strs": None},
    ),
    "/detokenize": (
        "Text of token ids",
        "tokens",
        DetokenizeBody,
        {"model": _MODEL, "tokens": [9906]},
        {"prompt": "Hello"},
    ),
}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    description = "OpenAI-compatible serving whose token streams outlive their workers."
    whole = get_openapi(title=app.title, version="1.0.0", description=description, routes=app.routes)
    bodies = [route[2] for route in _ROUTES.values()]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    declared = whole.setdefault("components", {})
    declared.setdefault("schemas", {}).update(components, Error=_ERROR_SCHEMA, MessagesError=_MESSAGES_ERROR_SCHEMA)
    declared["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    _document_errors(whole)
    for (path, (summary, tag, _body, example, answer)), schema in zip(_ROUTES.items(), schemas, strict=True):
        if path != "/v1/batches" or path in whole["paths"]:  # batches may be off
            whole["paths"].setdefault(path, {})["post"] = _operation(summary, tag, schema, example, answer)
    if "/v1/files" in whole["paths"]:
        whole["paths"]["/v1/files"]["post"] = _UPLOAD
    return whole


def _document_errors(whole: dict[str, Any]) -> None:
    """FastAPI documents its own validation errors, which cannot occur here, and none of ours."""
    for name in ("HTTPValidationError", "ValidationError"):
        whole["components"]["schemas"].pop(name, None)
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            tag = operation["tags"]
            if tag != ["health"]:
                operation["security"] = _SECURITY
                operation["responses"] |= dict.fromkeys(_codes_of(path, tag), _ERROR)


def _codes_of(path: str, tags: list[str]) -> tuple[str, ...]:
    if path == "/admin/workers":
        return ("401", "403")
    return ("400", "401", "403", "404", "503") if tags in (["batches"], ["responses"]) else ("401", "404", "503")


def _operation(
    summary: str, tag: str, schema: dict[str, Any], example: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}, "example": answer}}
    if tag in _STREAMS and "`stream`" in summary:
        content["text/event-stream"] = {"example": _STREAMS[tag]}
    error = _MESSAGES_ERROR if tag == "messages" else _ERROR
    return {
        "summary": summary,
        "tags": [tag],
        "security": _SECURITY,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}},
        "responses": {"200": {"description": "The answer", "content": content}, **dict.fromkeys(_CODES, error)},
    }
