"""The models that gateways and routers know even without a worker; a running service rereads them from a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.common.settings import PREFIX, CommaList, ServiceSettings

# Kubernetes takes about a minute to update a ConfigMap in a pod: a second adds little.
READ_EVERY_S = 1.0

log = logging.getLogger(__name__)

Names = frozenset[str]


class ExpectingSettings(ServiceSettings):
    """Settings of services that know models even without a worker."""

    expected_models: CommaList = Field(
        default=(),
        description="Models, comma-separated, that are known without any worker: their requests wait in the routers' "
        "queue, then 503, never 404; set it for gateways and routers",
    )
    expected_models_file: str = Field(
        default="", description="File with their names instead, one a line; read every second, so that it may change"
    )

    @model_validator(mode="after")
    def _one_way_to_models(self) -> Self:
        if self.expected_models and self.expected_models_file:
            raise ValueError(f"{PREFIX}EXPECTED_MODELS and {PREFIX}EXPECTED_MODELS_FILE: set one of them")
        try:
            self.read_expected()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{PREFIX}EXPECTED_MODELS_FILE cannot be read: {error}") from error
        return self

    def read_expected(self) -> Names:
        """Read the names; raises OSError or UnicodeDecodeError if their file cannot be read."""
        if not self.expected_models_file:
            return frozenset(self.expected_models)
        return _read_names(self.expected_models_file)


def _read_names(path: str) -> Names:
    return frozenset(name for line in Path(path).read_text("utf-8").splitlines() if (name := line.strip()))


async def follow_expected(path: str, names: Names, expect: Callable[[Names], None]) -> None:
    """Call `expect` whenever the names in the file change; return at once without a file.

    While the file cannot be read, the last names stay.
    """
    trouble = ""
    while path:
        await asyncio.sleep(READ_EVERY_S)
        try:
            found, reason = await asyncio.to_thread(_read_names, path), ""
        except (OSError, UnicodeDecodeError) as error:
            found, reason = names, str(error)
        if reason and reason != trouble:
            log.warning("%sEXPECTED_MODELS_FILE cannot be read, the expected models stay: %s", PREFIX, reason)
        trouble = reason
        if found != names:
            log.info("expected models: %s", ", ".join(sorted(found)) or "none")
            names = found
            expect(names)
