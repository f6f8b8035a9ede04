"""Configuration shared by every service: environment variables with the prefix ``RYZANSTEIN_``."""

from __future__ import annotations

import socket
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """What every service needs to know. Subclasses add their own fields; all are read once, at start."""

    model_config = SettingsConfigDict(env_prefix="RYZANSTEIN_", frozen=True, extra="ignore")

    namespace: str = Field(default="default", description="Separates installations that share one Redis")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="redis:// or unix:// URL")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    host: str = Field(default="127.0.0.1", description="Address that the service's ports listen on")
    advertise_host: str = Field(default="", description="Host name that peers reach this process by; default: `host`")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics, /livez and /readyz; 0 is off")

    def advertised(self, port: int) -> str:
        """The ``host:port`` that peers are told to call."""
        host = self.advertise_host or (socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
