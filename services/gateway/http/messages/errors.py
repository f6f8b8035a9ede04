"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

import msgspec

from services.common.logs import request_id_var
from services.gateway.errors import ApiError

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVERS_FAULT = 500


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body. What OpenAI's shape has beyond Anthropic's is in `details`, where clients look for a code."""
    other = "api_error" if error.status >= _SERVERS_FAULT else "invalid_request_error"
    kind = "overloaded_error" if error.code == "overloaded" else _TYPES.get(error.status, other)
    details = {"error_code": error.code, "param": error.param} | ({} if error.usage is None else {"usage": error.usage})
    about = {"type": kind, "message": error.message, "details": details}
    return {"type": "error", "error": about, "request_id": request_id_var.get()}


def error_frames(error: ApiError) -> bytes:
    """The last event of a stream that has begun."""
    return b"event: error\ndata: " + msgspec.json.encode(error_body(error)) + b"\n\n"
