"""Ports for servers that are started later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle

# Linux gives local ports to connections and to servers on port 0 from 32768 on, macOS from 49152 on.
_BELOW_EPHEMERAL = range(15_000, 32_768)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now; no process is given the same one twice in a row of thousands.

    A port that the kernel picked would come from the ephemeral range: until the server binds it, any connection of the
    machine may get the same one as its local port. Raises OSError when every port is taken.
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
    """The same order in no two processes: their servers may be started side by side."""
    return cycle(random.sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)))
