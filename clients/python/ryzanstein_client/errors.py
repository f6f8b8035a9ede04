"""Errors by what the caller can do about them."""

from __future__ import annotations

from dataclasses import dataclass

CONNECTION_LOST = "connection_lost"  # the code of an Unavailable that the server did not say itself


class RyzansteinError(Exception):
    """Anything that kept a call from its result."""

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed a little later."""
        return False


class TimedOut(RyzansteinError):
    """The call's own time was over."""


class ProtocolError(RyzansteinError):
    """An answer of the server that this client does not understand."""


@dataclass(frozen=True, slots=True)
class ErrorFields:
    """The fields of the server's error object."""

    message: str
    type: str = ""
    param: str | None = None
    code: str | None = None


class ApiError(RyzansteinError):
    """The server refused or failed the call."""

    def __init__(self, fields: ErrorFields, retry_after: float | None = None) -> None:
        super().__init__(fields.message)
        self.message = fields.message
        self.type = fields.type
        self.code = fields.code  # a word for programs, such as context_length_exceeded
        self.param = fields.param  # the field of the request that is wrong
        self.retry_after = retry_after  # seconds, where the server says so


class BadRequest(ApiError):
    """The request is wrong; `param` names the field."""


class Unauthorized(ApiError):
    """The API key is missing or unknown."""


class Forbidden(ApiError):
    """The API key does not allow this."""


class NotFound(ApiError):
    """There is no such model (or path, or generation)."""


class RateLimited(ApiError):
    """Too much at once, or a limit of the API key is reached; `retry_after` says how long to wait."""

    @property
    def retryable(self) -> bool:
        """Unless a month's quota is used up."""
        return self.code != "insufficient_quota"


class Unavailable(ApiError):
    """The server cannot be reached, or has no worker."""

    @property
    def retryable(self) -> bool:
        """Always."""
        return True


class ServerError(ApiError):
    """The server failed; it has retried by itself."""


class StreamInterrupted(RyzansteinError):
    """A stream broke after its first token: `text` is what had arrived, `__cause__` why there is no more."""

    def __init__(self, text: str, token_ids: tuple[int, ...], cause: RyzansteinError) -> None:
        super().__init__(f"the stream broke after {len(text)} characters: {cause}")
        self.text = text
        self.token_ids = token_ids


_BY_STATUS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    429: RateLimited,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def error_of_status(status: int, fields: ErrorFields, retry_after: float | None = None) -> ApiError:
    """The error of an HTTP status."""
    default = BadRequest if status < 500 else ServerError
    # The server's own limit for a request would be over again; a proxy's 504 is a connection that was lost.
    kind = ServerError if fields.code == "deadline_exceeded" else _BY_STATUS.get(status, default)
    return kind(fields, retry_after)


_BY_TYPE: dict[str, type[ApiError]] = {
    "invalid_request_error": BadRequest,
    "invalid_prompt": BadRequest,
    "permission_error": Forbidden,
}
_BY_CODE: dict[str, type[ApiError]] = {
    "model_not_found": NotFound,
    "unknown_generation": NotFound,
    "invalid_api_key": Unauthorized,
    "overloaded": RateLimited,
    "rate_limit_exceeded": RateLimited,
    "concurrency": RateLimited,
    "insufficient_quota": RateLimited,
    "no_workers": Unavailable,
    "keys_unavailable": Unavailable,
}


def error_of_object(fields: ErrorFields) -> ApiError:
    """The error of an error object that came inside of a stream, where there is no status."""
    kind = _BY_CODE.get(fields.code or "") or _BY_TYPE.get(fields.type, ServerError)
    return kind(fields)


def unreachable(message: str) -> Unavailable:
    """The server could not be reached, or the connection to it was lost."""
    return Unavailable(ErrorFields(message, "connection_error", code=CONNECTION_LOST))
