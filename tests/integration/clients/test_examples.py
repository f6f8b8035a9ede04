"""The clients and their examples against everything that `ryzanstein up` starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ryzanstein_client import Client, Message
from ryzanstein_client.grpc import GrpcClient
from ryzanstein_client.websocket import WebSocketClient

from services.common.ports import free_port
from tests.integration.clients.conftest import CLIENT
from tests.integration.clients.serving import DIRECT
from tests.shell import captured
from tests.stack import running_stack

STUBS = CLIENT.parents[1] / "generated"
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class ExampleInstallation:
    http: str
    grpc: str

    @property
    def ws(self) -> str:
        return self.http.replace("http", "ws")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleInstallation]:
    port = free_port()
    with running_stack(tmp_path_factory.mktemp("run"), "--grpc-port", str(port)) as stack:
        yield ExampleInstallation(stack.url, f"127.0.0.1:{port}")


async def test_every_transport_generates_the_same(installation: ExampleInstallation) -> None:
    options = {"temperature": 0.0, "max_tokens": 12}
    with Client(installation.http, DIRECT) as rest, GrpcClient(installation.grpc, DIRECT) as grpc:
        assert rest.models() == grpc.models()
        whole = rest.complete(PROMPT, **options)
        assert whole.usage.completion_tokens == 12
        assert whole.text == grpc.complete(PROMPT, **options).text
        assert rest.detokenize(rest.tokenize(PROMPT, add_special_tokens=False)) == PROMPT
        talk = [Message("user", "What is a list?")]
        assert rest.chat(talk, **options).text == grpc.chat(talk, **options).text
        with rest.stream_response("What is a list?", store=False, **options) as stream:
            reported = "".join(chunk.text for chunk in stream)
        assert reported == stream.response().text == rest.respond("What is a list?", store=False, **options).text
        assert rest.count_input_tokens("What is a list?") == stream.response().usage.prompt_tokens
        vectors = [client.embed(PROMPT).vectors[0] for client in (rest, grpc)]
        assert vectors[0] == pytest.approx(vectors[1], rel=1e-5)
    async with WebSocketClient(installation.ws, DIRECT) as client:
        assert "".join([chunk.text async for chunk in client.stream_completion(PROMPT, **options)]) == whole.text


@pytest.mark.parametrize(
    ("name", "proof"),
    [
        ("chat", "> "),
        ("stream", "Completion(text="),
        ("grpc_generate", "models: "),
        ("websocket_stream", "[60 tokens]"),
    ],
)
def test_examples(installation: ExampleInstallation, name: str, proof: str) -> None:
    target = {"grpc_generate": installation.grpc, "websocket_stream": installation.ws}.get(name, installation.http)
    shown = _example(name, target, "What is a list?\n\n" if name == "chat" else "")
    assert shown.returncode == 0, shown.stderr
    assert proof in shown.stdout


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a fresh environment with the client, installed by the README's first block."""
    programs = tmp_path_factory.mktemp("environment") / "venv" / "bin"
    venv.create(programs.parent, with_pip=True)
    index = _typed("pip download --no-deps -q hatchling", programs, programs)
    if index.returncode:
        pytest.skip(f"no package index answers: {index.stderr.strip()[-200:]}")
    block = re.search(r"^```sh\n(.*?)^```$", (clone / "clients/python/README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    done = _typed(block[1], clone, programs)
    assert done.returncode == 0, done.stdout + done.stderr
    return programs / "python"


def test_readme_installs_the_client_from_a_clone_and_runs(
    installation: ExampleInstallation, installed: Path, clone: Path
) -> None:
    ports = [address.rpartition(":")[2] for address in (installation.http, installation.grpc)]
    done = captured(
        [installed, "-I", Path(__file__).with_name("run_page.py"), clone / "clients/python/README.md", *ports]
    )
    assert done.returncode == 0, done.stderr


def _typed(text: str, folder: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    """The output of a shell for `text` in `folder`, with `programs` first on its path."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    once = {"PIP_NO_COMPILE": "1"}  # installed packages are used once
    return captured(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**os.environ, "PATH": path, **once}, timeout=500
    )


def test_chat_ends_quietly_at_the_end_of_its_input(installation: ExampleInstallation) -> None:
    shown = _example("chat", installation.http, "What is a list?\n")
    assert (shown.returncode, shown.stderr) == (0, "")


def _example(name: str, target: str, typed: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
        "PYTHONPATH": os.pathsep.join(map(str, (CLIENT, STUBS))),
    }
    return captured([sys.executable, str(Path(CLIENT, "examples", f"{name}.py")), target], env=environment, input=typed)
