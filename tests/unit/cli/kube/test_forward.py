"""A port of a pod as a port of this machine: what goes in comes out, each connection by itself."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from services.cli.kube.cluster import connect
from services.cli.kube.forward import forwarded
from tests.kube_api import NAMESPACE, KubeApi

PORT = 50052
PODS = ("ryzanstein-router-0", "ryzanstein-router-1")


@contextmanager
def shouting(name: str) -> Iterator[str]:
    """The address of a pod's port that answers in capitals, after the pod's name."""

    class Shout(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while message := self.request.recv(100):
                self.request.sendall(f"{name}: ".encode() + message.upper())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Shout) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_bytes_go_there_and_back(api: KubeApi) -> None:
    connect()
    with ExitStack() as stack:
        for pod in PODS:
            api.ports[f"{pod}:{PORT}"] = stack.enter_context(shouting(pod))
        addresses = [stack.enter_context(forwarded(NAMESPACE, pod, PORT)).rpartition(":") for pod in PODS]
        to = [(host, int(port)) for host, _, port in (*addresses, addresses[0])]
        connections = [stack.enter_context(socket.create_connection(each, 60)) for each in to]
        for number, (connection, pod) in enumerate(zip(connections, (*PODS, PODS[0]), strict=True)):
            connection.sendall(b"hello %d" % number)
            assert connection.recv(100) == f"{pod}: HELLO {number}".encode()


def test_a_refused_connection_ends(api: KubeApi) -> None:
    connect()
    with forwarded(NAMESPACE, "gone", PORT) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as connection:
            assert connection.recv(1) == b""
