"""Wakes the server's event loop from another process through an unnamed pipe, opened under /proc."""

from __future__ import annotations

import os


class Doorbell:
    """The server's end: a readable descriptor for `loop.add_reader`."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def clear(self) -> None:
        """Discard the rings so far. Call it before reading the messages, so that none is missed."""
        try:
            os.read(self.read_fd, 4096)
        except BlockingIOError:
            return  # no rings

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_fd)
        os.close(self.write_fd)


class DoorbellButton:
    """A rank's end of a doorbell that process `owner_pid` holds as `write_fd`."""

    def __init__(self, owner_pid: int, write_fd: int) -> None:
        self._fd = os.open(f"/proc/{owner_pid}/fd/{write_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Wake the owner."""
        try:
            os.write(self._fd, b"!")
        except BlockingIOError:
            return  # a full pipe wakes the owner anyway
