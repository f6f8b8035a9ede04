"""A port that is handed out stays free until its server binds it."""

from __future__ import annotations

import socket
from pathlib import Path

from services.common.ports import free_port


def test_no_port_is_given_twice_or_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        ports = [free_port() for _ in range(1000)]
        assert len({*ports, taken.getsockname()[1]}) == 1001
    for port in ports[:50]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_the_kernel_gives_none_of_them_away() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first for port in (free_port() for _ in range(1000)))
