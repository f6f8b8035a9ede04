"""Logs why Redis cannot be used, with a hint for the operator and never with any part of a password."""

from __future__ import annotations

import logging
import ssl
import time
from dataclasses import dataclass

from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.redis_client import RedisAccess

AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class OutageCause:
    """Why Redis cannot be used. Causes of the same `kind` are logged as one."""

    kind: str
    text: str


def cause_of(error: BaseException, access: RedisAccess) -> OutageCause:
    """Explain an error of a command or of connecting."""
    if tls := _tls_error(error):
        return OutageCause("tls", _tls_text(tls, access))
    match error:
        case AuthenticationError() if "PASSWORD_FILE" in str(error):  # raised by RedisAccess
            return OutageCause("password file", str(error))
        case AuthenticationError() | AuthenticationWrongNumberOfArgsError() | AuthorizationError():
            return OutageCause("authentication", _authentication_text(access))
        case ResponseError() if str(error).startswith(("NOAUTH", "WRONGPASS", "AUTH ")):
            return OutageCause("authentication", _authentication_text(access))
        case NoPermissionError():
            return OutageCause(
                "permission", f"its ACL does not let the user of RYZANSTEIN_REDIS_USERNAME do that: {_words(error)}"
            )
        case RedisTimeoutError() | TimeoutError():
            # A server without TLS waits for an end of line, which a TLS client never sends.
            hint = "; does it speak TLS, as rediss:// in RYZANSTEIN_REDIS_URL says?" if access.encrypted else ""
            return OutageCause("time-out", f"{access.place} does not answer in time{hint}")
        case RedisConnectionError() if "closed" in str(error).lower() or "reset" in str(error).lower():
            hint = "" if access.encrypted else "; if it speaks TLS, RYZANSTEIN_REDIS_URL must start with rediss://"
            return OutageCause("closed", f"{access.place} has closed the connection{hint}")
    return OutageCause(type(error).__name__, f"{access.place}: {_words(error)}")


def _authentication_text(access: RedisAccess) -> str:
    if not (source := access.password_source):
        return f"{access.place} wants a password: set RYZANSTEIN_REDIS_PASSWORD or RYZANSTEIN_REDIS_PASSWORD_FILE"
    return f"{access.place} refuses the password in {source} for the user {access.user or 'default'!r}"


def _tls_text(error: ssl.SSLError, access: RedisAccess) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {access.place} is not trusted ({error.verify_message}): RYZANSTEIN_REDIS_CA_FILE "
            f"names the file of its CA, RYZANSTEIN_REDIS_URL the host that it was made for"
        )
    return (
        f"TLS with {access.place} fails ({error.reason}): does it speak TLS, as rediss:// in RYZANSTEIN_REDIS_URL says?"
    )


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS library's error, which the client wraps."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


class RedisOutage:
    """Logs that Redis cannot be used: each kind of cause at once, and again every minute while it lasts."""

    def __init__(self, log: logging.Logger, access: RedisAccess, consequence: str) -> None:
        self._log = log
        self._access = access
        self._consequence = consequence
        self._logged: dict[str, float] = {}  # when, by kind of cause
        self.why = ""  # why the last use failed; empty if it succeeded

    def failed(self, error: BaseException) -> OutageCause:
        """Note that Redis could not be used."""
        cause, now = cause_of(error, self._access), time.monotonic()
        self.why = cause.text
        if now - self._logged.get(cause.kind, -AGAIN_S) >= AGAIN_S:
            self._log.warning("Redis is away, %s: %s", self._consequence, cause.text, extra={"cause": cause.kind})
            self._logged[cause.kind] = now
        return cause

    def ended(self) -> None:
        """Note that Redis could be used; cheap when there was no outage."""
        if self._logged:
            self._logged.clear()
            self.why = ""
            self._log.info("Redis is back")
