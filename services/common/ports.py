"""Free ports for servers that start later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle

# Below the ephemeral range, which begins at 32768 on Linux and at 49152 on macOS.
_BELOW_EPHEMERAL = range(15_000, 32_768)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now; a process gets the same port again only after thousands of others.

    The kernel would pick one from the ephemeral range: until the server binds it, any connection of the machine could
    get it as its local port. Raises OSError if all ports are taken.
    """
    candidates = _candidates()
    for _ in _BELOW_EPHEMERAL:
        port = next(candidates)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {_BELOW_EPHEMERAL.start} to {_BELOW_EPHEMERAL.stop - 1} is free on {host}")


@cache
def _candidates() -> Iterator[int]:
    """All ports in a random order, since several processes may start servers at the same time."""
    return cycle(random.sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)))
