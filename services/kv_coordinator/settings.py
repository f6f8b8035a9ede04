"""Configuration of the KV-cache coordinator."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class CoordinatorSettings(ServiceSettings):
    """Environment variables ``RYZANSTEIN_*`` of the coordinator."""

    coordinator_port: int = Field(default=50053, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    hot_prefixes: int = Field(default=1024, ge=16, description="Prefixes counted at a time, about 100 bytes each")
    max_pins: int = Field(default=10_000, ge=0, description="Pinned prefixes at a time")
