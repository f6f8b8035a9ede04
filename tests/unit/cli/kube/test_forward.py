"""A port of a pod as a port of this machine: what goes in comes out, each connection by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import websockets.sync.server as server
from kubernetes import client

from services.cli.kube.forward import forwarded

PORT = 50052
DATA, ERROR = b"\x00", b"\x01"


def shout(connection: server.ServerConnection) -> None:
    """An API server's port-forward (v4.channel.k8s.io) to a pod that answers in capitals."""
    for channel in (DATA, ERROR):
        connection.send(channel + PORT.to_bytes(2, "little"))
    for message in connection:
        assert isinstance(message, bytes)
        assert connection.request is not None
        pod = connection.request.path.split("/")[6].encode()
        connection.send(DATA + pod + b": " + message[1:].upper())


@pytest.fixture
def api() -> Iterator[None]:
    with server.serve(shout, "127.0.0.1", 0, subprotocols=["v4.channel.k8s.io"]) as running:  # type: ignore[list-item]
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        before = client.Configuration.get_default_copy()
        client.Configuration.set_default(configuration)
        yield
        client.Configuration.set_default(before)
        running.shutdown()
        thread.join()


def test_bytes_go_there_and_back(api: None) -> None:
    with forwarded("serving", "ryzanstein-router-0", PORT) as address:
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 60) as one,
            socket.create_connection((host, int(port)), 60) as two,
        ):
            for number, connection in enumerate((one, two)):
                connection.settimeout(60)
                connection.sendall(b"hello %d" % number)
                assert connection.recv(100) == b"ryzanstein-router-0: HELLO %d" % number
