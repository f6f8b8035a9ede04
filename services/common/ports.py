"""Free ports for servers that start later."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Below the ephemeral range, which begins at 32768 on Linux and at 49152 on macOS.
_BELOW_EPHEMERAL = range(15_000, 32_768)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now; no process of this user gets it again before thousands of others.

    The kernel would pick one from the ephemeral range: until the server binds it, any connection of the machine could
    get it as its local port. Raises OSError if all ports are taken.
    """
    for _ in _BELOW_EPHEMERAL:
        port = _next_port()
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {_BELOW_EPHEMERAL.start} to {_BELOW_EPHEMERAL.stop - 1} is free on {host}")


def _next_port() -> int:
    """The one after the last that any process of this user got: two that draw lots meet before their servers bind."""
    counter = Path(tempfile.gettempdir()) / f"ryzanstein-ports-{os.geteuid()}"
    with os.fdopen(os.open(counter, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        last = file.read()
        index = int(last) + 1 if last.isdigit() else random.randrange(len(_BELOW_EPHEMERAL))
        file.seek(0)
        file.truncate()
        file.write(str(index % len(_BELOW_EPHEMERAL)))
    return _BELOW_EPHEMERAL[index % len(_BELOW_EPHEMERAL)]
