"""gRPC runs on the poller that ADR-012 chose: a release that drops or ignores the choice breaks this."""

import os
import subprocess
import sys

import pytest

CALL = """
import asyncio
from services.common.rpc import bind, new_server, open_channel

async def call():
    server = new_server()
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(0)

asyncio.run(call())
"""
EVENT_ENGINE, POLLER = "posix_engine/", "tcp_posix.cc:"  # names in the lines of a trace of connections


@pytest.mark.parametrize(
    ("chosen", "used", "unused"),
    [
        (None, POLLER, EVENT_ENGINE),
        ("event_engine_client,event_engine_listener", EVENT_ENGINE, POLLER),
    ],
)
def test_connections_use_the_chosen_poller_unless_the_operator_says_otherwise(
    chosen: str | None, used: str, unused: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    environment |= {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "tcp"}
    environment |= {"GRPC_EXPERIMENTS": chosen} if chosen else {}
    process = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    assert used in process.stderr
    assert unused not in process.stderr
    assert "Unknown experiment" not in process.stderr
