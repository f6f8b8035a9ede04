"""A hub of our own: what huggingface_hub asks for, over real HTTP, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT, NEXT_COMMIT = "a" * 40, "b" * 40


@dataclass
class Hub:
    """One repository, and what goes wrong with it."""

    files: dict[str, bytes]
    repository: str = "org/tiny"
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)  # that are this commit
    token: str = ""  # asked for when not empty
    url: str = ""
    truncate: Counter[str] = field(default_factory=Counter)  # file: how often it is cut off
    damage: Counter[str] = field(default_factory=Counter)  # file: how often one byte is wrong
    fail: Counter[str] = field(default_factory=Counter)  # path: how often it is 503
    gated: bool = False  # access has to be requested on its page
    open_gate: threading.Event = field(default_factory=threading.Event)
    behind_gate: str = ""  # half of this file is held back until the gate opens
    waiting: threading.Event = field(default_factory=threading.Event)  # set when a download waits at the gate
    sent: Counter[str] = field(default_factory=Counter)  # bodies by file
    requests: list[str] = field(default_factory=list)

    def siblings(self) -> list[dict[str, Any]]:
        return [{"rfilename": name, **self._told(name, "blobId", "sha256")} for name in self.files]

    def tree(self) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, **self._told(name, "oid", "oid")} for name in self.files]

    def _told(self, name: str, git: str, large: str) -> dict[str, Any]:
        content = self.files[name]
        reported: dict[str, Any] = {"size": len(content), git: git_sha1(content)}
        if name.endswith((".safetensors", ".gguf")):
            reported["lfs"] = {large: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return reported


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def take(counter: Counter[str], key: str) -> bool:
    counter[key] -= 1
    return counter[key] >= 0


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(path)
        if take(hub.fail, path):
            self._answer(503, b"")
        elif hub.gated:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path in {f"/api/models/{hub.repository}/revision/{name}" for name in hub.revisions}:
            reported = {"id": hub.repository, "modelId": hub.repository, "sha": hub.commit, "siblings": hub.siblings()}
            self._json(reported)
        elif path.startswith(f"/api/models/{hub.repository}/tree/"):
            self._json(hub.tree())
        elif path.startswith(f"/{hub.repository}/resolve/{hub.commit}/"):
            self._file(path.removeprefix(f"/{hub.repository}/resolve/{hub.commit}/"))
        elif path.startswith(f"/api/models/{hub.repository}/revision/"):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        etag = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git_sha1(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, "X-Linked-Size": str(len(content))}
        begin = 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if self.command == "HEAD":
            self._answer(200, content, headers)
            return
        hub.sent[name] += 1
        body = content[begin:]
        if take(hub.damage, name):
            body = bytes([body[0] ^ 1]) + body[1:]
        self._head(206 if begin else 200, len(body), headers)
        if name == hub.behind_gate:
            self.wfile.write(body[: len(body) // 2])
            hub.waiting.set()
            hub.open_gate.wait(600)
            self.wfile.write(body[len(body) // 2 :])
        elif take(hub.truncate, name):
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.open_gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
