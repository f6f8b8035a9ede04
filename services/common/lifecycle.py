"""Start and end of every service process."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.common.logs import configure_logging
from services.common.settings import PREFIX, ServiceSettings
from services.common.wakeups import coalesce_wakeups

# The form of values that Kubernetes sets in every pod for each Service, in variables like RYZANSTEIN_GATEWAY_PORT.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")

log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class StartupError(Exception):
    """The service cannot start; the message is one line for the operator."""


class GaveUpError(Exception):
    """The service ran, cannot continue, and should be started elsewhere; the message is for the operator."""


def run_service(
    service: str,
    settings_type: type[SettingsT],
    main: Callable[[SettingsT, asyncio.Event], Coroutine[None, None, None]],
) -> None:
    """Read the settings and run `main(settings, stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`.

    Exits with status 1 and one log line if a setting is wrong or `main` raises :class:`StartupError`,
    :class:`GaveUpError` or OSError.
    """

    async def supervise(settings: SettingsT) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        await main(settings, stop)

    configure_logging(service, "info")
    allow_descriptors()
    coalesce_wakeups()
    try:
        settings = read_settings(settings_type)
        configure_logging(service, settings.log_level)
        uvloop.run(supervise(settings))
    except (StartupError, OSError) as error:
        log.error("cannot start: %s", error)
        sys.exit(1)
    except GaveUpError as error:
        log.error("giving up: %s", error)
        sys.exit(1)


def allow_descriptors() -> None:
    """Raise the soft limit of open descriptors, often 1,024, to the hard one: each worker takes a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_settings(settings_type: type[SettingsT]) -> SettingsT:
    """Read settings from the environment; raises StartupError, with one line that names every wrong variable."""
    try:
        return settings_type()
    except ValidationError as error:
        complaints = [_complaint(settings_type, detail) for detail in error.errors()]
        raise StartupError("; ".join(complaints)) from None  # the original error shows secret values


def _complaint(settings: type[ServiceSettings], error: ErrorDetails) -> str:
    """An error message with the variable, its value and what is allowed."""
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    reason = reason.replace("Input should", "it should")
    if not error["loc"]:  # an error about several variables, which it names itself
        return reason
    field = settings.model_fields[str(error["loc"][0])]
    variable = f"{PREFIX}{str(error['loc'][0]).upper()}"
    if error["type"] == "missing":
        return f"{variable} is not set: {field.description}"
    value: Any = error["input"]
    if isinstance(value, str) and _SERVICE_LINK.match(value):
        reason = (
            f"set by Kubernetes' service links for a Service of that name; enableServiceLinks: false in the pod's spec "
            f"turns them off ({reason})"
        )
    return f"{variable}: {reason}" if not field.repr else f"{variable} is {value!r}: {reason}"
