"""The pages about keys and routes, typed on one machine: an installation that needs keys, a key and a route there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.commands import BLOCK, ROOT
from tests.programs import program
from tests.shell import captured
from tests.stack import running_stack


def on_one_machine(page: str) -> list[str]:
    """The page's blocks of commands for one machine."""
    section = (ROOT / "docs" / page).read_text().partition("## On one machine")[2].partition("\n## ")[0]
    return [block["text"] for block in BLOCK.finditer(section)]


def typed(text: str, folder: Path, **environment: str) -> str:
    done = captured(["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**os.environ, **environment})
    assert done.returncode == 0, done
    return done.stdout


def test_key_and_route_are_made_and_used_on_a_single_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("openssl"), program("curl")
    (first, keys), (same, routes) = on_one_machine("api-keys.md"), on_one_machine("routes.md")
    assert first.replace("RYZANSTEIN_TENANCY=true ", "") == same
    settings, _, up = first.strip().rpartition("\n")
    assert up == "ryzanstein up"
    admin = free_port()
    shown = typed(f"{settings.replace('8001', str(admin))}\nenv", tmp_path)
    for name, value in re.findall(r"^(RYZANSTEIN_(?:TENANCY|ADMIN_\w+))=(.*)$", shown, re.MULTILINE):
        monkeypatch.setenv(name, value)
    with running_stack(tmp_path / "run", "--tensor-parallel", "1") as stack:
        with_key = routes.replace("/v1/models/chat", '/v1/models/chat -H "x-api-key: $RYZANSTEIN_API_KEY"')
        client = f"{keys}\n{with_key}"
        client = client.replace("8000", str(stack.port)).replace(
            "| ryzanstein chat", f"| ryzanstein chat --port {stack.port}"
        )
        client = client.replace("smollm2-135m-instruct", TINY_MODEL.name)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        answer = typed(client, tmp_path, PATH=path, RYZANSTEIN_ADMIN_URL=f"http://127.0.0.1:{admin}")
    assert "acme" in answer
    assert f'"targets":["{TINY_MODEL.name}"]' in answer
