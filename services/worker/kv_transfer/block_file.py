"""The file of one KV block on a disk.

    magic and version, number of wire hashes, identity, digest, parent, size and CRC of the contents, wire hashes, CRC
    of all these; then the contents

The identity names the layout and the root of the hashes, so a file of another model, format or size is foreign. A file
appears under its final name only when it is complete, but a machine that fails may leave fewer bytes: what does not
match its checksums counts as damaged.
"""

from __future__ import annotations

import os
import struct
import zlib
from hashlib import sha256
from pathlib import Path

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.scheduling.places import BlockName

_MAGIC = b"RZKV\x01\x00"
_HEAD = struct.Struct("<6sH32s32s32sQI")
_MOST_HASHES = 256
_LONGEST_HEAD = _HEAD.size + 8 * _MOST_HASHES + 4
TEMPORARY = ".part"


class DamagedError(Exception):
    """The file is not the block that its name promises."""


def layout_identity(layout: pb.KvLayout) -> bytes:
    """A digest of the properties that two processes must share to exchange KV blocks."""
    fields = (layout.hash_root, layout.device, layout.tensor_parallel, layout.block_tokens, layout.block_bytes)
    return sha256("\0".join(map(str, fields)).encode()).digest()


def write_block(path: Path, identity: bytes, name: BlockName, content: bytes) -> None:
    """Write a block, whole or not at all. Raises OSError."""
    head = _HEAD.pack(
        _MAGIC, len(name.hashes), identity, name.digest, name.parent or bytes(32), len(content), zlib.crc32(content)
    )
    head += struct.pack(f"<{len(name.hashes)}Q", *name.hashes)
    part = path.with_name(path.name + TEMPORARY)
    try:
        with part.open("wb") as file:  # in a folder that only this user can enter
            file.writelines((head, struct.pack("<I", zlib.crc32(head)), content))
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_name(path: Path, identity: bytes) -> BlockName:
    """The name of a block by its file's header. Raises DamagedError, OSError."""
    with path.open("rb") as file:
        name, size, _crc, start = _parse(file.read(_LONGEST_HEAD), identity)
        if os.fstat(file.fileno()).st_size != start + size:
            raise DamagedError("the file's size is not the block's")
    if path.name != name.digest.hex():
        raise DamagedError("the file holds another block")
    return name


def read_block(path: Path, identity: bytes, digest: bytes, n_bytes: int) -> bytes:
    """The contents of a block of `n_bytes`. Raises DamagedError, OSError."""
    with path.open("rb", buffering=0) as file:  # a block is copied once, from the page cache
        name, size, crc, start = _parse(file.read(_LONGEST_HEAD), identity)
        file.seek(start)
        content = file.readall()
    if name.digest != digest:
        raise DamagedError("the file holds another block")
    if not size == len(content) == n_bytes:
        raise DamagedError(f"{len(content)} bytes where {n_bytes} are one block")
    if zlib.crc32(content) != crc:
        raise DamagedError("wrong checksum")
    return content


def _parse(data: bytes, identity: bytes) -> tuple[BlockName, int, int, int]:
    """Name, size, CRC and start of the contents."""
    if len(data) < _HEAD.size:
        raise DamagedError("no header")
    magic, n_hashes, theirs, digest, parent, size, crc = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedError("no KV block of this version")
    end = _HEAD.size + 8 * n_hashes
    if n_hashes > _MOST_HASHES or len(data) < end + 4:
        raise DamagedError("no header")
    if struct.unpack_from("<I", data, end)[0] != zlib.crc32(data[:end]):
        raise DamagedError("wrong checksum of the header")
    if theirs != identity:
        raise DamagedError("a block of another model or layout")
    hashes = struct.unpack_from(f"<{n_hashes}Q", data, _HEAD.size)
    return BlockName(digest, parent if any(parent) else b"", hashes), size, crc, end + 4
