"""From plain text to mutual TLS: neighbouring phases can call each other, on the event loop of services."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import Health, bind, new_server, open_channel
from services.common.tls.credentials import Tls, TlsPhase
from services.common.tls.issuing import Authority
from services.gateway.upstream.channels import became_ready
from tests.certificates import DAY, write
from tests.trust import SILENT_S


@pytest.mark.parametrize("theirs", [None, *TlsPhase])
def test_neighbouring_phases_can_call_each_other(tmp_path: Path, theirs: TlsPhase | None) -> None:
    uvloop.run(call_servers_of_all_phases(tmp_path, theirs))


async def test_a_handshake_with_a_busy_peer_takes_its_time(tmp_path: Path) -> None:
    """A try that ends after a tenth of a second never gets through TLS with a worker that is starved of CPU."""
    authority = Authority.new(DAY)
    server_side, client_side = (Tls(write(tmp_path / name, name, authority)) for name in ("worker", "gateway"))
    server = new_server(tls=server_side)
    port = bind(server, "127.0.0.1", 0, server_side)
    await server.start()
    slow = await asyncio.start_server(partial(answer_late, port), "127.0.0.1", 0)
    address = "{}:{}".format(*slow.sockets[0].getsockname())
    async with open_channel(address, to="worker", tls=client_side) as channel:
        assert await became_ready(channel, SILENT_S), "the first try has failed"
    slow.close()
    await server.stop(0)


async def answer_late(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Relay to `port`, each piece of an answer a tenth of a second late."""
    of_server, to_server = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, late_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                await asyncio.sleep(late_s)
                target.write(data)
        target.close()

    await asyncio.gather(copy(reader, to_server, 0), copy(of_server, writer, 0.1))


async def call_servers_of_all_phases(tmp_path: Path, theirs: TlsPhase | None) -> None:
    authority = Authority.new(DAY)
    server_side, client_side = (write(tmp_path / name, name, authority) for name in ("worker", "router"))
    phases: list[TlsPhase | None] = [None, *TlsPhase]
    for ours in phases:
        tls = Tls(server_side, ours) if ours else None
        server = new_server(tls=tls)
        health = Health(server, [])
        await health.set_serving(True)
        port = bind(server, "127.0.0.1", free_port(), tls)
        await server.start()
        asking = Tls(client_side, theirs) if theirs else None
        async with open_channel(f"127.0.0.1:{port}", to="worker", tls=asking) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            large = health_pb2.HealthCheckRequest(service="x" * 4_000_000)  # larger than every buffer on the way
            with pytest.raises(grpc.aio.AioRpcError) as answer:
                await stub.Check(large, timeout=SILENT_S)
            heard = answer.value.code() is grpc.StatusCode.NOT_FOUND
            both = abs(phases.index(ours) - phases.index(theirs)) <= 1
            assert heard or not both, (ours, theirs)
            assert not heard or (ours, theirs) != (TlsPhase.REQUIRE, None)
        await server.stop(0)
