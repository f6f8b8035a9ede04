"""The page about keys, typed on one machine: an installation that needs keys, and a key that works there."""

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

PAGE = (ROOT / "docs/api-keys.md").read_text()
SECTION = PAGE.partition("## On one machine")[2].partition("\n## ")[0]
FIRST, SECOND = (block["text"] for block in BLOCK.finditer(SECTION))


def typed(text: str, folder: Path, **environment: str) -> str:
    done = captured(["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**os.environ, **environment})
    assert done.returncode == 0, done
    return done.stdout


def test_key_is_made_and_used_on_a_single_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("openssl"), program("curl")
    settings, _, up = FIRST.strip().rpartition("\n")
    assert up == "ryzanstein up"
    admin = free_port()
    shown = typed(f"{settings.replace('8001', str(admin))}\nenv", tmp_path)
    for name, value in re.findall(r"^(RYZANSTEIN_(?:TENANCY|ADMIN_\w+))=(.*)$", shown, re.MULTILINE):
        monkeypatch.setenv(name, value)
    with running_stack(tmp_path / "run", "--tensor-parallel", "1") as stack:
        client = SECOND.replace("8000", str(stack.port)).replace(
            "ryzanstein chat", f"ryzanstein chat --port {stack.port}"
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        answer = typed(client, tmp_path, PATH=path, RYZANSTEIN_ADMIN_URL=f"http://127.0.0.1:{admin}")
    assert "acme" in answer
    assert TINY_MODEL.name in answer
