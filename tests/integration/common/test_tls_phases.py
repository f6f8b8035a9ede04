"""From plain text to mutual TLS: neighbouring phases can call each other, on the event loop of services."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import Health, bind, new_server, open_channel
from services.common.tls.credentials import Phase, Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write
from tests.trust import SILENT_S


@pytest.mark.parametrize("theirs", [None, *Phase])
def test_neighbouring_phases_can_call_each_other(tmp_path: Path, theirs: Phase | None) -> None:
    uvloop.run(call_servers_of_all_phases(tmp_path, theirs))


async def call_servers_of_all_phases(tmp_path: Path, theirs: Phase | None) -> None:
    authority = Authority.new(DAY)
    server_side, client_side = (write(tmp_path / name, name, authority) for name in ("worker", "router"))
    phases: list[Phase | None] = [None, *Phase]
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
            assert not heard or (ours, theirs) != (Phase.REQUIRE, None)
        await server.stop(0)
