"""A route's entry in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

EXAMPLE_MODEL = "smollm2-135m-instruct"
HEALTH = "health"  # the tag of routes for probes and scrapers


@dataclass(frozen=True, slots=True)
class Documentation:
    """The entry of a route that takes JSON; an example shows its answer."""

    summary: str
    tag: str
    body: type[msgspec.Struct]
    example: dict[str, Any]
    answer: dict[str, Any]
    parts: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)  # structs inside the body, by their titles
