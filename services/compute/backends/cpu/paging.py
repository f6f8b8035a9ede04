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
_IN_MEMORY = (0x01021994, 0x858458F6)  # TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_libc = ctypes.CDLL(None, use_errno=True)


def page_out() -> None:
    """Move the memory that only this process has to a file, whose pages come back when they are touched.

    The file has no name; it takes room on the disk until the process ends or moves its memory again. Other threads wait
    meanwhile. Raises OSError: no folder is on a disk, the disk is full, or this machine has no such library.
    """
    library = ctypes.CDLL(str(LIBRARY))
    library.rz_page_out.argtypes, library.rz_page_out.restype = (ctypes.c_int, ctypes.c_char_p), ctypes.c_long
    folder = folder_on_disk()
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=folder) as file:
        file.truncate(_ROOM)
        result = int(library.rz_page_out(file.fileno(), _PREFIX.encode()))
    if result < 0:
        raise OSError(-result, os.strerror(-result), folder)


def folder_on_disk() -> str:
    """Return the folder for temporary files, or another one where that folder is in memory. Raises OSError."""
    folder = tempfile.gettempdir()
    for place in (folder, _ON_DISK):
        if _file_system(place) not in _IN_MEMORY:
            return place
    raise OSError(errno.EOPNOTSUPP, "TMPDIR has to name a folder on a disk, not in memory", folder)


def _file_system(folder: str) -> int:
    """Return the number of a folder's kind of file system. Raises OSError."""
    report = (ctypes.c_long * 32)()  # a struct statfs, which begins with f_type
    if _libc.statfs(os.fsencode(folder), report):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    return int(report[0])
