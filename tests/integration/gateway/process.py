"""The gateway as a process of its own, with workers and a router in the test's event loop."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.common.ports import free_port


@dataclass
class GatewayProcess:
    """`python -m services.gateway`, and what it has written."""

    process: asyncio.subprocess.Process
    port: int
    grpc_port: int
    metrics_port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@asynccontextmanager
async def gateway_process(router: str, output: Path, **environment: str) -> AsyncIterator[GatewayProcess]:
    """A gateway that is ready; ended with SIGTERM, if the test has not done so."""
    ports = free_port(), free_port(), free_port()
    names = "GATEWAY_PORT", "GRPC_PORT", "METRICS_PORT"
    fields = {"ROUTER_ADDRESSES": router, **dict(zip(names, map(str, ports), strict=True)), **environment}
    with output.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway"),
            env={**os.environ, **{f"RYZANSTEIN_{name}": value for name, value in fields.items()}},
            stdout=file,
            stderr=asyncio.subprocess.STDOUT,
        )
    gateway = GatewayProcess(process, *ports, output)
    try:
        await _ready(gateway.url)
        yield gateway
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _ready(url: str) -> None:
    async with asyncio.timeout(120), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.05)
