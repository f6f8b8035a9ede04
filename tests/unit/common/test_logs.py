"""A service writes JSON lines, and nothing else."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.shell import captured

# A client whose server ends: gRPC's core has a line for it in about every other run.
LOSES_A_CONNECTION = """
import asyncio, logging
from services.common.logs import configure_logging
import grpc.aio

async def loses_a_connection():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        await server.stop(0)
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)

async def main():
    for _ in range(16):
        await loses_a_connection()
    logging.getLogger("test").info("done")

configure_logging("test", "info")
asyncio.run(main())
"""


@pytest.mark.parametrize(("given", "own_lines"), [({}, False), ({"GRPC_VERBOSITY": "INFO"}, True)])
def test_grpc_logs_only_when_configured(given: dict[str, str], own_lines: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | given
    done = captured([sys.executable, "-c", LOSES_A_CONNECTION], env=environment, check=True)
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == ["done"]
    assert bool(done.stderr) is own_lines, done.stderr
