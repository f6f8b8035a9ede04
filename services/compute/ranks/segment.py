"""Memory shared between the server process and its ranks, without a name in any file system."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

if sys.byteorder != "little":
    raise ImportError("the shared-memory transport reads 64-bit counters by their low word: little-endian only")


class Segment:
    """A mapped, anonymous memory file (`memfd_create`).

    The kernel frees it when no process maps it any more, so a crash leaves nothing behind. Other processes of the
    same user open it through `/proc/<owner pid>/fd/<fd>`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.size)
        self.view = memoryview(self._map)  # [size] bytes
        self.words64 = self.view.cast("Q")  # [size / 8]
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, label: str, size: int) -> Segment:
        """Make a zeroed segment of at least `size` bytes; the kernel allocates a page at its first use."""
        fd = os.memfd_create(f"ryzanstein-{label}", os.MFD_CLOEXEC)
        os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        return cls(fd)

    @classmethod
    def attach(cls, owner_pid: int, fd: int) -> Segment:
        """Map the segment that process `owner_pid` holds as `fd`; raises OSError when that process is gone."""
        return cls(os.open(f"/proc/{owner_pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def keep(self) -> None:
        """Keep the mapping until this process ends, even without references to it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))

    def close(self) -> None:
        """Close the descriptor. The mapping stays until its last view is garbage-collected."""
        os.close(self.fd)
