"""Configuration of the router."""

from __future__ import annotations

import secrets
import socket
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.router_addresses import router_address
from services.common.settings import PREFIX, CommaList, ServiceSettings, peer_address
from services.router.policies.configuration import PolicySetting


def _default_router_id() -> str:
    # Two routers must never share an id: workers acknowledge dispatches by router id.
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


class RouterSettings(ServiceSettings):
    """Environment variables ``RYZANSTEIN_*`` of the router."""

    router_port: int = Field(default=50052, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    router_id: str = Field(default_factory=_default_router_id, min_length=1, description="Unique among live routers")
    coordinator_address: CommaList = Field(
        default=(),
        description="host:port of the KV-cache coordinator, or of all of them, comma-separated, where they divide the "
        "workers; empty: no prefix credit",
    )
    expected_models: CommaList = Field(
        default=(),
        description="Models, comma-separated, that are known without any worker: their requests wait in the queue, "
        "then 503, never 404. Default: those that a worker has served within the last hour",
    )
    expected_models_config_map: str = Field(
        default="",
        description="ConfigMap of the pod's namespace with their names instead, one a line of its key `expected`; "
        "watched, so that it may change. Its key `scaling` names the pools that routers scale",
    )
    router_peers: CommaList = Field(
        default=(),
        description="All routers as host:port or dns:host:port, comma-separated; the router that scales asks each for "
        "its requests",
    )
    service_account_folder: str = Field(
        default="/var/run/secrets/kubernetes.io/serviceaccount",
        description="Folder with the token, ca.crt and namespace by which the ConfigMap is watched and pools "
        "are scaled",
    )
    policy: PolicySetting = Field(
        default="cost",
        description="Choice of the worker: cost, round_robin, weighted, least_loaded, session_hash, or a map of "
        "filters, scorers and a picker (policies.md)",
    )
    saturation_s: float = Field(
        default=30.0, gt=0, description="A worker with a longer queue of prefill work gets no new requests"
    )
    queue_size: int = Field(default=2000, ge=0, description="Requests that may wait for an eligible worker, per model")
    queue_timeout_s: float = Field(
        default=10.0,
        ge=0,
        description="Longest wait while workers serve the model, at most nine tenths of the gateway's "
        "route_timeout_s; then 429. While none does, requests wait for the gateway's patience_s",
    )
    lookup_timeout_ms: float = Field(
        default=25.0,
        gt=0,
        description="Longest wait of a decision for the lookup of cached prefixes; computing a prompt again mostly "
        "takes longer",
    )
    redis_timeout_ms: float = Field(
        default=250.0,
        gt=0,
        description="A command that takes longer is abandoned; sessions are then placed by hash, away from their "
        "caches",
    )

    @field_validator("coordinator_address")
    @classmethod
    def _coordinators(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(peer_address(entry) for entry in entries)

    @field_validator("router_peers")
    @classmethod
    def _addresses(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(router_address(entry) for entry in entries)

    @model_validator(mode="after")
    def _one_way_to_models(self) -> Self:
        if self.expected_models and self.expected_models_config_map:
            raise ValueError(f"{PREFIX}EXPECTED_MODELS and {PREFIX}EXPECTED_MODELS_CONFIG_MAP: set one of them")
        return self
