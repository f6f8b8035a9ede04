"""The part of Kubernetes' API server that routers use, over TLS: watches of one ConfigMap, a Lease, scales."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from services.common.tls.certificate import CERTIFICATE, KEY, Identity
from services.common.tls.issuing import Authority
from tests.certificates import DAY

Object = dict[str, Any]

NAME, NAMESPACE, TOKEN = "ryzanstein-models", "llm", "token-of-the-pod"


class ConfigMaps(ThreadingHTTPServer):
    """The ConfigMap of the models; `folder` becomes that of the service account."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Watch)
        authority = Authority.new(DAY)
        issued = authority.issue(Identity("rz.llm", "api"), DAY, hosts=["localhost"])
        for name, content in (
            ("ca.crt", authority.own.certificate),
            (CERTIFICATE, issued.certificate),
            (KEY, issued.key),
        ):
            (folder / name).write_bytes(content)
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "token").write_text(TOKEN)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.environment = {"EXPECTED_MODELS_CONFIG_MAP": NAME, "SERVICE_ACCOUNT_FOLDER": str(folder)}
        self.data: dict[str, str] | None = None  # None: there is no such ConfigMap
        self.refused = 0  # the status of all answers
        self.watches = 0  # number of watches that have begun
        self.version = 0
        self.changed = threading.Condition()
        # Leases and scales by path; each write needs the version that it was made from.
        self.objects: dict[str, Object] = {}
        self.pods: list[Object] = []
        self.before: dict[str, Callable[[], object]] = {}  # called once before a request of a method, e.g. PUT
        self.writes: list[str] = []  # paths
        self.serving = threading.Lock()

    def write(self, *names: str, scaling: Object | None = None) -> None:
        """As Helm writes the names of all pools, and those that routers scale."""
        self._change({"expected": "\n".join(names)} | ({"scaling": json.dumps(scaling)} if scaling else {}))

    def put(self, path: str, spec: Object) -> None:
        """Write an object, as if somebody else had."""
        with self.serving:
            self._keep(path, {"spec": spec})

    def spec(self, path: str) -> Object:
        """The spec of an object as it is."""
        with self.serving:
            return dict(self.objects[path]["spec"])

    def replace(self, path: str, body: Object) -> tuple[int, Object]:
        """The answer to a PUT or a merge patch of the spec."""
        with self.serving:
            known = self.objects.get(path)
            if known is None:
                return 404, {"message": f"{path} not found"}
            if body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return 409, {"message": f"{path} has been modified"}
            self.writes.append(path)
            return 200, self._keep(path, {"spec": known["spec"] | body["spec"]})

    def _keep(self, path: str, written: Object) -> Object:
        version = int(self.objects.get(path, {"metadata": {"resourceVersion": "0"}})["metadata"]["resourceVersion"])
        # Go leaves zeros out.
        spec = {key: value for key, value in written["spec"].items() if value not in (0, "")}
        self.objects[path] = {"spec": spec, "metadata": {"name": path, "resourceVersion": str(version + 1)}}
        return self.objects[path]

    def remove(self) -> None:
        """As if somebody had deleted the ConfigMap."""
        self._change(None)

    def refuse(self, status: int) -> None:
        """End all watches, and refuse later ones."""
        self.refused = status
        self._change(self.data)

    def server_close(self) -> None:
        """End the watches as well."""
        super().server_close()
        self.refuse(503)

    def _change(self, data: dict[str, str] | None) -> None:
        with self.changed:
            self.data, self.version = data, self.version + 1
            self.changed.notify_all()


class _Watch(BaseHTTPRequestHandler):
    server: ConfigMaps
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in self.server.objects or "/leases/" in self.path or "/scale" in self.path:
            self._answer(None)
            return
        url = urlsplit(self.path)
        query = {key: value for key, (value,) in parse_qs(url.query).items()}
        if url.path == f"/api/v1/namespaces/{NAMESPACE}/pods":
            self._list_pods(query)
            return
        assert url.path == f"/api/v1/namespaces/{NAMESPACE}/configmaps"
        assert (query["watch"], query["fieldSelector"]) == ("true", f"metadata.name={NAME}")
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.server.refused:
            self.send_error(self.server.refused)
            return
        self.server.watches += 1
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for event in self._events():
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

    def _list_pods(self, query: dict[str, str]) -> None:
        assert query == {"labelSelector": "app.kubernetes.io/component=worker", "resourceVersion": "0"}
        if self.server.refused:
            self.send_error(self.server.refused)
            return
        content = json.dumps({"kind": "PodList", "items": self.server.pods}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        self._answer("application/json")

    def do_PATCH(self) -> None:
        self._answer("application/merge-patch+json")

    def _answer(self, content_type: str | None) -> None:
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)) or 0) or b"{}")
        if before := self.server.before.pop(self.command, None):
            before()
        if self.server.refused:
            status, answer = self.server.refused, {"message": "refused"}
        elif content_type is None:
            with self.server.serving:
                known = self.server.objects.get(self.path)
            status, answer = (200, known) if known else (404, {"message": f"{self.path} not found"})
        else:
            assert self.headers["Content-Type"] == content_type
            status, answer = self.server.replace(self.path, body)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _events(self) -> Iterator[dict[str, object]]:
        known, kind, server = None, "ADDED", self.server
        while not server.refused:
            version, data = server.version, server.data
            if data != known:
                kind = "DELETED" if data is None else kind
                yield {"type": kind, "object": {"metadata": {"name": NAME}, "data": known if data is None else data}}
                known, kind = data, "MODIFIED"
            if known is None:
                return  # a watch of no object, which is over
            with server.changed:
                server.changed.wait_for(lambda version=version: server.version > version)  # type: ignore[misc]


@contextmanager
def running_config_maps(folder: Path) -> Iterator[ConfigMaps]:
    """Serve until the block ends."""
    folder.mkdir()
    with ConfigMaps(folder) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()
