"""Keeps the weights of a process that sleeps in a file, as the kernels take them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from services.compute.backends.parking import Restore

_LEAST = 1 << 18  # bytes of a tensor; smaller ones move to the disk with the process's other memory
_WRITTEN, _READ = 1 << 24, 1 << 21  # bytes at a time
_NICENESS = 5  # threads that read have so much more than the process
_SHARE = 0.5  # most of a disk's free space that the weights take


@dataclass(frozen=True, slots=True)
class _Copy:
    """The numbers of a storage, which has no memory, in the file from `start` on."""

    storage: UntypedStorage
    start: int
    size: int  # bytes


def park_in_file(tensors: Iterable[Tensor], folder: str, memory: int) -> Restore:
    """Free the memory of large `tensors`, views of them included, after a copy to a file without a name in `folder`.

    No tensor may be used until the returned function has brought the numbers back, to other addresses. Raises OSError,
    and leaves all tensors as they were, if they are larger than the free `memory` or than half of the free disk, or
    cannot be written. In less memory the system would write them to the disk before it has room for other models.
    """
    storages = _storages(tensors)
    needed, free = sum(storage.nbytes() for storage in storages), shutil.disk_usage(folder).free
    if needed > min(memory, _SHARE * free):
        room = f"{memory >> 20} MiB of memory and {free >> 20} MiB of disk are free, which is too little for"
        raise OSError(errno.ENOSPC, f"{room} {needed >> 20} MiB of weights", folder)
    file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115 - `restore` closes it
    copies, end = list[_Copy](), 0

    def restore() -> None:
        with file:
            _read_all(file.fileno(), copies)

    try:
        for storage in storages:
            _write(file.fileno(), storage, end)
            copies.append(_Copy(storage, end, storage.nbytes()))
            end += storage.nbytes()
            storage.resize_(0)
    except OSError:
        restore()
        raise
    return restore


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the large storages of tensors that have memory of their own; each once."""
    every = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    large = (storage for storage in every if storage.nbytes() >= _LEAST and storage.resizable())
    return list({storage.data_ptr(): storage for storage in large}.values())


def _bytes_of(storage: UntypedStorage) -> memoryview:
    """Return the memory of a storage; a NumPy array of it would forbid to free it."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _write(file: int, storage: UntypedStorage, start: int) -> None:
    memory, done = _bytes_of(storage), 0
    while done < len(memory):
        done += os.pwrite(file, memory[done : done + _WRITTEN], start + done)


def _read_all(file: int, copies: Iterable[_Copy]) -> None:
    """Give the storages memory, and read their numbers on all cores. Raises OSError.

    The threads give way to the steps of models that are awake: threads of a step wait for each other several times in
    a layer, so that one without a core holds up all.
    """
    pieces = list[tuple[memoryview, int]]()
    for copy in copies:
        copy.storage.resize_(copy.size)
        memory = _bytes_of(copy.storage)
        pieces += [(memory[at : at + _READ], copy.start + at) for at in range(0, copy.size, _READ)]
    # On Linux a thread has a niceness of its own.
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=os.nice, initargs=(_NICENESS,)) as threads:
        list(threads.map(lambda piece: _read(file, *piece), pieces))


def _read(file: int, memory: memoryview, start: int) -> None:
    done = 0
    while done < len(memory):
        n_bytes = os.preadv(file, [memory[done:]], start + done)
        if not n_bytes:
            raise OSError(errno.EIO, "the file of parked weights is too short")
        done += n_bytes
