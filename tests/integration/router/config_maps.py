"""The part of Kubernetes' API server that routers use, over TLS: watches of one ConfigMap."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from services.common.tls.certificate import CERTIFICATE, KEY, Identity
from services.common.tls.issuing import Authority
from tests.certificates import DAY

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
        self.version = 0
        self.changed = threading.Condition()

    def write(self, *names: str) -> None:
        """As Helm writes the names of all pools."""
        self._change({"expected": "\n".join(names)})

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
        url = urlsplit(self.path)
        query = {key: value for key, (value,) in parse_qs(url.query).items()}
        assert url.path == f"/api/v1/namespaces/{NAMESPACE}/configmaps"
        assert (query["watch"], query["fieldSelector"]) == ("true", f"metadata.name={NAME}")
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.server.refused:
            self.send_error(self.server.refused)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for event in self._events():
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

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
