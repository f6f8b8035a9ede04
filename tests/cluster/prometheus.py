"""A Prometheus behind a port-forward, asked by its HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Prometheus:
    """The bundled one."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=20).json()
        assert answer["status"] == "success", f"{path} {parameters}: {answer}"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        actual: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return actual
