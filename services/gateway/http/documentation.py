"""What a route says of itself in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

EXAMPLE_MODEL = "ryzanstein-tiny"
HEALTH = "health"  # the tag of what probes and scrapers ask for


@dataclass(frozen=True, slots=True)
class Documentation:
    """Of a route that takes JSON; what it answers is shown by an example."""

    summary: str
    tag: str
    body: type[msgspec.Struct]
    example: dict[str, Any]
    answer: dict[str, Any]
