"""`ryzanstein kube ensure-secrets` against an API over HTTP that keeps secrets as Kubernetes does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app

NAMESPACE = "serving"
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets"
ARGUMENTS = ("kube", "ensure-secrets", "--namespace", NAMESPACE)


class Server(ThreadingHTTPServer):
    """A mock API server: its secrets by name, the requests it got, and the requests it refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.secrets: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.forbidden: set[str] = set()
        self.made_meanwhile = ""

    def password(self, name: str, key: str = "password") -> str:
        return base64.b64decode(self.secrets[name]["data"][key]).decode()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.removeprefix(f"{PATH}/")
        if self._allowed():
            found = self.server.secrets.get(name)
            self._answer(200, found) if found else self._status(404, "NotFound")

    def do_POST(self) -> None:
        secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = secret["metadata"]["name"]
        if not self._allowed():
            return
        if name == self.server.made_meanwhile:
            self.server.secrets[name] = secret
        if name in self.server.secrets:
            self._status(409, "AlreadyExists")
            return
        self.server.secrets[name] = secret
        self._answer(201, secret)

    def _allowed(self) -> bool:
        self.server.asked.append(f"{self.command} {self.path}")
        if self.command in self.server.forbidden:
            self._status(403, "Forbidden")
            return False
        return True

    def _status(self, code: int, reason: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "reason": reason, "code": code})

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(kubeconfig))
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # read from KUBECONFIG at import
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ensure(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*ARGUMENTS, *arguments])


def words(result: Result) -> str:
    """Without the breaks of the terminal's width."""
    return " ".join(result.output.split())


def test_each_secret_is_made_once_with_a_password_of_its_own(api: Server) -> None:
    names = ("--name", "redis-1", "--name", "redis-2", "--label", "app.kubernetes.io/instance=mine")
    result = ensure(*names)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [f"secret {NAMESPACE}/redis-{n} made" for n in (1, 2)]
    first, second = api.password("redis-1"), api.password("redis-2")
    assert first != second
    assert min(len(first), len(second)) >= 43, "32 random bytes"
    assert set(first) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"), "for a URL as it is"
    assert api.secrets["redis-1"]["metadata"]["labels"] == {"app.kubernetes.io/instance": "mine"}
    again = ensure(*names)
    assert again.exit_code == 0
    assert again.output.splitlines() == [f"secret {NAMESPACE}/redis-{n} is there already" for n in (1, 2)]
    assert (api.password("redis-1"), api.password("redis-2")) == (first, second)
    assert not any(secret in result.output for secret in (first, second))


def test_a_password_that_is_there_is_kept_also_when_another_run_made_it_just_now(api: Server) -> None:
    api.secrets["own"] = {"metadata": {"name": "own"}, "data": {"token": base64.b64encode(b"mine").decode()}}
    assert ensure("--name", "own", "--key", "token").exit_code == 0
    assert api.password("own", "token") == "mine"
    assert api.asked == [f"GET {PATH}/own"], "nothing is written"
    api.made_meanwhile = "raced"
    result = ensure("--name", "raced")
    assert (result.exit_code, result.output) == (0, f"secret {NAMESPACE}/raced is there already\n")


def test_a_secret_without_the_key_is_refused_and_not_touched(api: Server) -> None:
    api.secrets["own"] = {"metadata": {"name": "own"}, "data": {"other": "", "more": ""}}
    result = ensure("--name", "own")
    assert result.exit_code == 1
    said = words(result)
    assert f"secret {NAMESPACE}/own has no key 'password', only ['more', 'other']" in said
    assert api.asked == [f"GET {PATH}/own"]


@pytest.mark.parametrize("verb", ["GET", "POST"])
def test_a_refusal_of_the_api_server_fails_and_says_which_secret(api: Server, verb: str) -> None:
    api.forbidden.add(verb)
    result = ensure("--name", "mine")
    assert result.exit_code == 1
    assert f"secret {NAMESPACE}/mine: Forbidden (403)" in words(result)
    assert not api.secrets


def test_a_label_without_a_value_is_refused_before_anything_is_asked(api: Server) -> None:
    result = ensure("--name", "mine", "--label", "broken")
    assert result.exit_code == 1
    assert "--label broken: expected NAME=VALUE" in words(result)
    assert not api.asked
