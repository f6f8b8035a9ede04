"""A port that is handed out stays free until its server binds it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
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


def test_a_port_taken_meanwhile_is_skipped() -> None:
    following = range(free_port() + 1, free_port() + 40)
    with contextlib.ExitStack() as stack:
        for port in following:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert free_port() not in following


def test_service_ports_are_outside_the_ephemeral_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first for port in (free_port() for _ in range(1000)))


def test_concurrent_processes_get_different_ports() -> None:
    script = "from services.common.ports import free_port; print(*(free_port() for _ in range(300)))"
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ports = [port for process in started for port in process.communicate()[0].split()]
    assert len(ports) == len(set(ports)) == 1200
