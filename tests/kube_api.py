"""A small API server of Kubernetes over HTTP: one namespace's objects, as a store that tests fill, read and break."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol
from websockets.sync.server import ServerConnection

from tests.kubeconfig import use_kubeconfig, write_kubeconfig

Object = dict[str, Any]
Api = TypeVar("Api", bound="KubeApi")

NAMESPACE = "llm"
NO_ANSWER = 0
_REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 500: "InternalError"}
_DATA, _ERROR = b"\x00", b"\x01"  # channels of a port-forward
_LOOKED_UP = {  # kinds that templates of a chart look up
    "/api/v1": ("PersistentVolumeClaim", "Pod", "Secret", "Service"),
    "/apis/apps/v1": ("Deployment", "StatefulSet"),
    "/apis/storage.k8s.io/v1": ("StorageClass",),
}


class KubeApi(ThreadingHTTPServer):
    """Objects of one namespace by plural kind and name, those of the whole cluster among them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str], Object] = {}
        self.asked: list[str] = []  # e.g. `GET secrets/redis`, `LIST pods`
        self.refused: dict[str, int] = {}  # the status of all answers about a kind, or of `VERB kind`
        self.before: dict[str, Callable[[], object]] = {}  # called before `VERB kind` is answered
        self.kubeconfig = Path()
        self.ports: dict[str, str] = {}  # the addresses that stand for a pod's port, as `pod:port`
        self.kept: Counter[str] = Counter()  # writes, by kind
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, kind: str, *objects: Object) -> None:
        """Store objects of a kind, as if somebody had created or changed them."""
        with self._lock:
            for actual in objects:
                self._keep(kind, copy.deepcopy(actual))

    def answer(self, verb: str, kind: str, name: str, body: Object | None, selector: str) -> tuple[int, Object | str]:
        """The status and the body of an answer; with NO_ANSWER the connection is closed."""
        asks = f"{verb} {kind}"
        self.asked.append(f"{asks}/{name}" if name else asks)
        self.before.get(asks, lambda: None)()
        if status := self.refused.get(asks, self.refused.get(kind)):
            return _status(status, f"{verb} of {kind} is refused")
        with self._lock:
            if verb == "LIST":
                actual = [each for (of, _), each in self.objects.items() if of == kind and _selects(selector, each)]
                return 200, {"kind": "List", "items": actual}
            if verb == "POST":
                assert body is not None
                return self._create(kind, body)
            known = self.objects.get((kind, name))
            if known is None:
                return _status(404, f'{kind} "{name}" not found')
            if verb == "DELETE":
                return 200, self.objects.pop((kind, name))
            if verb == "PUT":
                assert body is not None
                if body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                    return _status(409, f'{kind} "{name}" has been modified')
                return 200, self._keep(kind, body)
            return 200, known

    def _create(self, kind: str, body: Object) -> tuple[int, Object]:
        if (kind, body["metadata"]["name"]) in self.objects:
            return _status(409, "AlreadyExists")
        return 201, self._keep(kind, body)

    def _keep(self, kind: str, actual: Object) -> Object:
        meta = actual["metadata"]
        self.kept[kind] += 1
        meta["resourceVersion"] = str(self.kept.total())
        meta.setdefault("uid", f"{kind}-{self.kept[kind]}")
        meta.setdefault(
            "creationTimestamp", f"2026-11-25T10:{self.kept[kind] // 60 % 60:02}:{self.kept[kind] % 60:02}Z"
        )
        self.objects[kind, meta["name"]] = actual
        return actual

    def finish_request(self, request: Any, client_address: Any) -> None:
        """A WebSocket is a port-forward, all else a request for objects."""
        head = request.recv(4096, socket.MSG_PEEK).partition(b"\r\n")[0].decode()
        if "/portforward" in head:
            self._forward(request, head.split()[1])
        else:
            super().finish_request(request, client_address)

    def _forward(self, request: socket.socket, target: str) -> None:
        path = urlsplit(target)
        (port,) = parse_qs(path.query)["ports"]
        pod = path.path.split("/")[-2]
        protocol = ServerProtocol(subprotocols=["v4.channel.k8s.io"])  # type: ignore[list-item]
        server = SimpleNamespace(socket_closed=threading.Event())
        connection = ServerConnection(request, protocol, server)  # type: ignore[arg-type]
        if (address := self.ports.get(f"{pod}:{port}")) is None:
            connection.handshake(lambda connection, _: connection.respond(404, f'pod "{pod}" not found'))
            return
        connection.handshake()
        for channel in (_DATA, _ERROR):
            connection.send(channel + int(port).to_bytes(2, "little"))
        host, _, local = address.rpartition(":")
        with socket.create_connection((host, int(local))) as service, contextlib.suppress(ConnectionClosed, OSError):
            threading.Thread(target=_bring, args=(service, connection), daemon=True).start()
            for message in connection:
                assert isinstance(message, bytes)
                service.sendall(message[1:])
            service.shutdown(socket.SHUT_RDWR)


def _bring(service: socket.socket, connection: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed, OSError):
        while data := service.recv(1 << 16):
            connection.send(_DATA + data)
    connection.close()


class _Handler(BaseHTTPRequestHandler):
    server: KubeApi
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def do_PUT(self) -> None:
        self._respond("PUT")

    def do_DELETE(self) -> None:
        self._respond("DELETE")

    def _respond(self, verb: str) -> None:
        url = urlsplit(self.path)
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        status, answer = 200, _discovered(url.path)
        if answer is None:
            kind, name = _about(url.path)
            verb = "LIST" if verb == "GET" and not name else verb
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            status, answer = self.server.answer(verb, kind, name, body, selector)
        if status == NO_ANSWER:
            self.close_connection = True
            return
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status, _REASONS.get(status))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _discovered(path: str) -> Object | None:
    """The parts of a server that Helm reads before it looks up objects; None for paths of objects."""
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path in ("/api", "/apis"):
        return {"kind": "APIVersions", "versions": ["v1"]} if path == "/api" else {"kind": "APIGroupList", "groups": []}
    if path not in _LOOKED_UP:
        return None
    resources = [
        {"name": f"{kind}{'es' if kind.endswith('s') else 's'}".lower(), "kind": kind, "namespaced": True, "verbs": []}
        for kind in _LOOKED_UP[path]
    ]
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _about(path: str) -> tuple[str, str]:
    """The plural kind and the name, if there is one, of /api/v1/… or /apis/GROUP/VERSION/…."""
    _, root, *parts = path.split("/")
    del parts[: 1 if root == "api" else 2]
    if parts[0] == "namespaces" and len(parts) > 2:
        del parts[:2]
    return parts[0], parts[1] if parts[1:] else ""


def _selects(selector: str, actual: Object) -> bool:
    wanted = dict(each.split("=") for each in selector.split(",") if each)
    return wanted.items() <= (actual["metadata"].get("labels") or {}).items()


def _status(code: int, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "status": "Failure", "reason": _REASONS[code], "code": code, "message": message}


@contextmanager
def running_kube_api(api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The API server that the kubeconfig of this process names, with the namespace `llm`."""
    with api:
        threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        api.kubeconfig = write_kubeconfig(folder / "kubeconfig", api.url, NAMESPACE)
        use_kubeconfig(monkeypatch, api.kubeconfig)
        yield api
        api.shutdown()
