"""Moves the memory of a process that sleeps to a disk."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile

from services.compute.kernels.paging.build import LIBRARY

_PREFIX = "ryzanstein-asleep-"
_ON_DISK = "/var/tmp"  # where the folder for temporary files is in memory
_ROOM = 1 << 40  # file size, nearly all of it a hole: mappings that grow stay within the file


def page_out() -> None:
    """Move the memory that only this process has to a file, whose pages come back when they are touched.

    The file has no name; it takes room on the disk until the process ends or moves its memory again. Other threads wait
    meanwhile. Raises OSError: no folder is on a disk, the disk is full, or this machine has no such library.
    """
    library = ctypes.CDLL(str(LIBRARY))
    library.rz_page_out.argtypes, library.rz_page_out.restype = (ctypes.c_int, ctypes.c_char_p), ctypes.c_long
    folder = tempfile.gettempdir()
    result = _page_out_to(folder, library)
    if result == -errno.EOPNOTSUPP and folder != _ON_DISK:
        folder = _ON_DISK
        result = _page_out_to(folder, library)
    if result == -errno.EOPNOTSUPP:
        raise OSError(errno.EOPNOTSUPP, "TMPDIR has to name a folder on a disk, not in memory", folder)
    if result < 0:
        raise OSError(-result, os.strerror(-result), folder)


def _page_out_to(folder: str, library: ctypes.CDLL) -> int:
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=folder) as file:
        file.truncate(_ROOM)
        return int(library.rz_page_out(file.fileno(), _PREFIX.encode()))
