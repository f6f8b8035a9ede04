"""Kubernetes' API for trainings over real HTTP: Jobs, pods and a Deployment in memory. The test plays controllers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

NAMESPACE, OWNER, OWNER_UID = "serving", "ryzanstein-finetuner", "uid-of-the-owner"
NO_ANSWER = 0  # the connection is closed


@dataclass
class ApiServer:
    """The namespace, and what goes wrong with requests."""

    url: str = ""
    jobs: dict[str, Object] = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    refuse: list[tuple[str, int, str]] = field(default_factory=list)  # as "GET jobs/name"; status and body, once each
    made: int = 0  # Jobs
    looks: int = 0  # at a Job

    def job(self) -> Object:
        """The only Job."""
        [job] = self.jobs.values()
        return job

    def set_pod(self, phase: str, *, name: str = "pod", **status: Any) -> None:
        """Set the status of the Job's pod `name`; a new one is younger than those before."""
        labels = {"batch.kubernetes.io/job-name": self.job()["metadata"]["name"]}
        self.pods = [pod for pod in self.pods if pod["metadata"]["name"] != name]
        created = f"2026-01-01T00:00:{len(self.pods):02}Z"
        metadata = {"name": name, "labels": labels, "creationTimestamp": created}
        self.pods.insert(0, {"metadata": metadata, "status": {"phase": phase, **status}})
        self.job()["status"]["ready"] = int(phase == "Running")

    def end_job(self, kind: str, **reason: str) -> None:
        """Give the Job its last condition."""
        self.job()["status"] = {"conditions": [{"type": kind, "status": "True", **reason}]}

    def being_deleted(self) -> None:
        """Have the Job wait for its pods, as one does that was deleted in the foreground."""
        self.job()["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"

    def delete(self, name: str) -> None:
        """Take a Job away, and its pods."""
        del self.jobs[name]
        self.pods.clear()


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        kind, name = self._asked_for()
        if self._refused():
            return
        if kind == "deployments" and name == OWNER:
            self._answer(200, {"metadata": {"name": OWNER, "uid": OWNER_UID}})
        elif kind == "jobs" and name in self.api.jobs:
            self.api.looks += 1
            self._answer(200, self.api.jobs[name])
        elif name:
            self._status(404, f'{kind} "{name}" not found')
        else:
            there = list(self.api.jobs.values()) if kind == "jobs" else self.api.pods
            self._answer(200, {"items": [one for one in there if self._selects(one)]})

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = job["metadata"]["name"]
        if self._refused():
            return
        if name in self.api.jobs:
            self._status(409, f'jobs.batch "{name}" already exists')
            return
        self.api.made += 1
        uid = f"uid-{self.api.made}"
        job["metadata"]["uid"], job["status"] = uid, {}
        [container] = job["spec"]["template"]["spec"]["containers"]
        container["args"] = [argument.replace("$(JOB_UID)", uid) for argument in container["args"]]  # as kubelets do
        self.api.jobs[name] = job
        self._answer(201, job)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, name = self._asked_for()
        if self._refused():
            return
        if name not in self.api.jobs:
            self._status(404, f'jobs.batch "{name}" not found')
            return
        deleted = self.api.jobs[name]
        self.api.delete(name)
        self._answer(200, deleted)

    def _asked_for(self) -> tuple[str, str]:
        _, _, rest = urlsplit(self.path).path.partition(f"/namespaces/{NAMESPACE}/")
        kind, _, name = rest.partition("/")
        return kind, name

    def _selects(self, one: Object) -> bool:
        [selector] = parse_qs(urlsplit(self.path).query)["labelSelector"]
        return set(selector.split(",")) <= {f"{name}={value}" for name, value in one["metadata"]["labels"].items()}

    def _refused(self) -> bool:
        """Refuse the request if one like it is to be refused."""
        asked = f"{self.command} {'/'.join(filter(None, self._asked_for()))}"
        for refusal in self.api.refuse:
            request, status, body = refusal
            if request == asked:
                self.api.refuse.remove(refusal)
                if status == NO_ANSWER:
                    self.close_connection = True
                else:
                    self._send(status, body.encode())
                return True
        return False

    def _status(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _answer(self, code: int, body: Object) -> None:
        self._send(code, json.dumps(body).encode())

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running_api_server() -> Iterator[ApiServer]:
    api = ApiServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
