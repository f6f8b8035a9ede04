"""Configuration of the KV-cache coordinator."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import ServiceSettings


class CoordinatorSettings(ServiceSettings):
    """Environment variables ``RYZANSTEIN_*`` of the coordinator."""

    coordinator_port: int = Field(default=50053, ge=0, le=65535, description="gRPC port; 0 picks a free one")
