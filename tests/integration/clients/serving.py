"""A gateway with REST, WebSocket and gRPC behind breakable networks, and one way to call every client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ryzanstein_client import AsyncClient, Chunk, Client, Settings
from ryzanstein_client.grpc import AsyncGrpcClient, GrpcClient

from services.common.ports import free_port
from tests.integration.clients.breaking import Network, network
from tests.integration.gateway.fleet import Worker, scripted_token
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

PROMPT = "The quick brown fox"
DIRECT = Settings(use_proxies=False, timeout_s=60)
AnyClient = Client | AsyncClient | GrpcClient | AsyncGrpcClient
ALL = ("rest", "rest-async", "grpc", "grpc-async")


# In Hermes' form, of a model that thinks, and short: its context is.
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools, <tool_call>{% endif %}{# <think> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
)


def spelled(text: str, **options: Any) -> Worker:
    """A worker that says one text."""
    ids = byte_level().encode(text).ids
    return Worker("w0", token=lambda prompt, seed, position: ids[position], template=TOOL_TEMPLATE, **options)


@dataclass(frozen=True)
class Served:
    """A gateway and the networks to it."""

    stack: GatewayStack
    http: Network
    grpc: Network

    @asynccontextmanager
    async def client(self, kind: str, settings: Settings = DIRECT) -> AsyncIterator[AnyClient]:
        if kind == "rest":
            with Client(self.http.http, settings) as client:
                yield client
        elif kind == "grpc":
            with GrpcClient(self.grpc.address, settings) as client:
                yield client
        elif kind == "rest-async":
            async with AsyncClient(self.http.http, settings) as client:
                yield client
        else:
            async with AsyncGrpcClient(self.grpc.address, settings) as client:
                yield client

    def network(self, kind: str) -> Network:
        return self.grpc if kind.startswith("grpc") else self.http


@asynccontextmanager
async def served(workers: Sequence[Worker] | None = None, **overrides: Any) -> AsyncIterator[Served]:
    port = free_port()
    fleet = [Worker("w0")] if workers is None else workers
    async with (
        running_stack(fleet, grpc_port=port, **overrides) as stack,
        network(stack.gateway.http.port) as http,
        network(port) as grpc,
    ):
        yield Served(stack, http, grpc)


async def call(client: AnyClient, method: str, *args: Any, **options: Any) -> Any:
    """The answer of a call; clients that block do so in a thread."""
    function = getattr(client, method)
    if isinstance(client, Client | GrpcClient):
        return await asyncio.to_thread(function, *args, **options)
    return await function(*args, **options)


async def read(client: AnyClient, method: str, *args: Any, **options: Any) -> list[Chunk]:
    """All chunks of a stream."""
    return (await followed(client, method, *args, **options))[0]


async def followed(client: AnyClient, method: str, *args: Any, **options: Any) -> tuple[list[Chunk], Any]:
    """All chunks of a stream, and the stream."""
    stream = getattr(client, method)(*args, **options)
    if isinstance(client, Client | GrpcClient):
        return await asyncio.to_thread(list, stream), stream
    return [chunk async for chunk in stream], stream


def expected_ids(seed: int, count: int) -> tuple[int, ...]:
    prompt = byte_level().encode(PROMPT).ids
    return tuple(scripted_token(prompt, seed, position) for position in range(count))


def expected_text(seed: int, count: int) -> str:
    return str(byte_level().decode(list(expected_ids(seed, count))))
