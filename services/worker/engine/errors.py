"""Errors of an engine's operations."""

from __future__ import annotations

from enum import Enum


class EngineError(Exception):
    """Base of the errors of an engine."""


class InvalidRequestError(EngineError, ValueError):
    """A field of a request has a value that this engine does not accept."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class TooLongError(InvalidRequestError):
    """The request can never fit; `field` is too long."""


class NotServingError(EngineError):
    """A request was submitted while the engine refuses requests."""


class PhaseRefusedError(EngineError):
    """The phase, or requests that run or wait, do not allow to sleep or to wake now."""


class NoRoomError(EngineError):
    """Memory does not suffice to wake."""


class UnsupportedError(EngineError):
    """The engine does not have the operation."""


class GenerationError(EngineError):
    """A request ended before its last token, without a text that can be used."""


class Unavailable(Enum):
    """Why KV blocks cannot be read."""

    GONE = "gone"  # the ranks that held them have ended
    MISMATCH = "mismatch"  # the reader's KV layout differs
    BUSY = "busy"
    LOST = "lost"  # the ranks ended during the read


class BlocksUnavailableError(EngineError):
    """KV blocks cannot be read."""

    def __init__(self, reason: Unavailable, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
