"""Without `--release`, the commands for a cluster look after the one release that the namespace has."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app


class Server(ThreadingHTTPServer):
    """An API server whose namespace has one pod, not scheduled yet, for each release."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.releases: list[str] = []

    def pods(self, selector: str) -> list[dict[str, Any]]:
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        made = [
            {"app.kubernetes.io/name": "ryzanstein", "app.kubernetes.io/instance": release} for release in self.releases
        ]
        return [
            {
                "metadata": {"name": f"{labels['app.kubernetes.io/instance']}-router-0", "labels": labels},
                "spec": {"containers": []},
                "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]},
            }
            for labels in [*made, {"app.kubernetes.io/name": "redis", "app.kubernetes.io/instance": "theirs"}]
            if wanted.items() <= labels.items()
        ]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        selector = parse_qs(url.query).get("labelSelector", [""])[0]
        body = json.dumps({"items": self.server.pods(selector) if url.path.endswith("/pods") else []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}
        config = {
            "clusters": [cluster],
            "contexts": [context],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # read from KUBECONFIG at import
            monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        yield server
        server.shutdown()


def kube(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kube", *arguments])


COMMANDS = (("doctor",), ("status",), ("drain-worker", "POD"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (COMMANDS[0], "pod/r-router-0 is Pending"),
        (COMMANDS[1], "no router of r in llm is ready"),
        (COMMANDS[2], "no router of r in llm is ready"),
    ],
)
def test_the_only_release_needs_no_name(api: Server, command: tuple[str, ...], said: str) -> None:
    api.releases = ["r"]
    answer = kube(*command)
    assert answer.exit_code == 1
    assert said in answer.output


@pytest.mark.parametrize("command", COMMANDS)
def test_one_of_several_has_to_be_named(api: Server, command: tuple[str, ...]) -> None:
    api.releases = ["r", "q"]
    answer = kube(*command)
    assert answer.exit_code == 1
    assert answer.output == "ryzanstein: namespace llm has several releases, --release NAME takes one: q, r\n"
    assert "q in llm" in kube("status", "--release", "q").output


def test_an_empty_namespace_is_said(api: Server) -> None:
    assert "namespace llm has nothing of a release ryzanstein" in kube("doctor").output
