"""Forwards a local port to a port of a pod through the API server, as `kubectl port-forward` does."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from kubernetes import client
from kubernetes.stream import portforward

_CHUNK = 1 << 16


@contextmanager
def forwarded(namespace: str, pod: str, port: int) -> Iterator[str]:
    """Yield the local ``host:port``, which is forwarded while the block runs; each connection has its own tunnel."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=_accept, args=(listener, namespace, pod, port), daemon=True)
        accepting.start()
        host, local = listener.getsockname()
        yield f"{host}:{local}"
        with suppress(OSError):  # ends accept() in the thread
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, namespace: str, pod: str, port: int) -> None:
    with suppress(OSError):  # the listener is closed: the block has ended
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_carry, args=(connection, namespace, pod, port), daemon=True).start()


def _carry(connection: socket.socket, namespace: str, pod: str, port: int) -> None:
    """Copy both ways until either end closes. If the API server refuses, the connection closes."""
    with connection, suppress(OSError, client.ApiException):
        api = client.CoreV1Api()
        tunnel = portforward(api.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))
        with closing(tunnel.socket(port)) as far:
            far.setblocking(True)
            _pump(connection, far)


def _pump(near: socket.socket, far: socket.socket) -> None:
    ends = {near: far, far: near}
    while True:
        readable, _, _ = select.select(list(ends), [], [])
        for end in readable:
            data = end.recv(_CHUNK)
            if not data:
                return
            ends[end].sendall(data)
