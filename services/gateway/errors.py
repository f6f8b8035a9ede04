"""The error type that reaches clients, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

GRAMMAR_FAILED = "grammar_failed"
NO_MODEL = "model_not_found"
NO_WORKERS = "no_workers"  # with this code the fallback model answers


@dataclass(eq=False)  # not frozen: contextlib sets __traceback__ on exceptions
class ApiError(Exception):
    """A refused or failed request: HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    usage: dict[str, Any] | None = field(default=None)  # tokens used before the failure

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error} if self.usage is None else {"error": error, "usage": self.usage}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, "invalid_request_error", param, code)


def unknown_model(model: str, known: list[str]) -> ApiError:
    """404: no worker serves the model."""
    served = ", ".join(f"`{name}`" for name in known) or "none yet"
    message = f"The model `{model}` does not exist. Models served here: {served}."
    return ApiError(404, message, "invalid_request_error", "model", NO_MODEL)


def model_not_allowed(model: str, allowed: Collection[str]) -> ApiError:
    """403: the caller's key is limited to other models, whether or not this one exists."""
    names = ", ".join(f"`{name}`" for name in allowed)
    message = f"This key may not use the model `{model}`. Models that it may use: {names}."
    return ApiError(403, message, "permission_error", "model", "model_not_allowed")


def too_long(limit: int, prompt_tokens: int, max_tokens: int, param: str, *, at_least: bool = False) -> ApiError:
    """400: prompt and requested output exceed the model's context; `at_least`: the count stopped early."""
    requested = f"{'at least ' if at_least else ''}{prompt_tokens + max_tokens}"
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {requested} "
        f"tokens ({prompt_tokens} in the prompt, {max_tokens} for the completion)."
    )
    return invalid(message, param, "context_length_exceeded")


def too_large(limit: int) -> ApiError:
    """413: the body, compressed or not, exceeds the gateway's limit."""
    message = f"The request's body is larger than {limit} bytes."
    return ApiError(413, message, "invalid_request_error", code="body_too_large")


def overloaded(message: str, retry_after_s: float = 1.0) -> ApiError:
    """429: no worker could take the request in time."""
    return ApiError(429, message, "overloaded_error", code="overloaded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: float = 2.0) -> ApiError:
    """503: there is no worker, or the service is ending."""
    return ApiError(503, message, "service_unavailable_error", code=NO_WORKERS, retry_after_s=retry_after_s)


def no_worker(model: str, retry_after_s: float = 2.0) -> ApiError:
    """503: no worker serves the model."""
    return unavailable(f"No worker serves the model `{model}` at the moment.", retry_after_s)


def shutting_down() -> ApiError:
    """503: the drain of this gateway is over."""
    message = "This gateway is shutting down and could not finish the request in time. Send it again."
    return ApiError(503, message, "service_unavailable_error", code="shutting_down", retry_after_s=1.0)


def resumes_exhausted(retry_after_s: float) -> ApiError:
    """503: too many requests lost their worker for the other workers to resume them in time."""
    message = "The request was interrupted, and too many others are being resumed already."
    return ApiError(503, message, "service_unavailable_error", code="resume_budget", retry_after_s=retry_after_s)


def internal_error() -> ApiError:
    """500: a bug in the gateway; its log has the details."""
    return ApiError(500, "The gateway failed to serve the request.", "server_error", code="internal_error")


def interrupted(message: str, code: str = "generation_failed") -> ApiError:
    """500: workers failed, and the request has no retries left."""
    return ApiError(500, message, "server_error", code=code)


def deadline_exceeded(limit_s: float, generated: int, computed: int, known: int) -> ApiError:
    """504: the request's time is over, after `generated` tokens, or with the KV of `computed` of its `known` ones."""
    far = f"after {generated} tokens" if generated else f"with {computed} of the prompt's {known} tokens computed"
    message = f"The request's time of {limit_s:g} s is over, {far}."
    return ApiError(504, message, "timeout_error", code="deadline_exceeded")


def storage_away(objects: str = "Files, batches and jobs") -> ApiError:
    """503: Redis, which keeps these `objects`, does not answer."""
    return ApiError(
        503,
        f"{objects} cannot be reached at the moment.",
        "service_unavailable_error",
        code="storage_unavailable",
        retry_after_s=2,
    )
