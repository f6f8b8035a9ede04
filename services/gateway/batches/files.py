"""Files in Redis: lists of pieces that expire, counted against the storage limits of the tenant and of all tenants."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from services.common.keys import RedisKeys
from services.common.redis_client import Argument
from services.gateway.batches import scripts
from services.gateway.batches.objects import File, Purpose, new_object_id
from services.gateway.errors import ApiError, invalid
from services.gateway.tenants.redis_guard import RedisGuard

PIECE_BYTES = 256 * 1024
_UPLOAD_LIFE_S = 600  # for a file that is not complete
_READ_BYTES = 1024 * 1024
_MOST_FILES = 1000  # per tenant
_SWEPT = 100


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The bytes that files may take, and the seconds for which they are kept."""

    total: int
    tenant: int
    file: int
    life_s: int


class FileGoneError(Exception):
    """A file was removed."""


def no_file(file_id: str) -> ApiError:
    """404: the tenant has no such file."""
    message = f"No such File object: {file_id}"
    return ApiError(404, message, "invalid_request_error", "id", "file_not_found")


class FileStore:
    """The files of all tenants. All methods raise :class:`RedisAwayError`."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, limits: StorageLimits) -> None:
        self.guard = guard
        self.keys = keys
        self.limits = limits
        client = guard.client
        self._append = client.register_script(scripts.APPEND)
        self._publish = client.register_script(scripts.PUBLISH)
        self._remove = client.register_script(scripts.REMOVE)
        self._expired = client.register_script(scripts.EXPIRED)

    async def list(self, tenant: str) -> list[File]:
        """A tenant's files, the oldest first."""
        client, key = self.guard.client, self.keys.files(tenant)
        texts = await self.guard.run(lambda: client.hgetall(key))
        files = [msgspec.json.decode(text, type=File) for text in texts.values()]
        return sorted((file for file in files if file.expires_at > time.time()), key=lambda file: file.id)

    async def get(self, tenant: str, file_id: str) -> File:
        """One file; raises :class:`ApiError` (404)."""
        client, key = self.guard.client, self.keys.files(tenant)
        text = await self.guard.run(lambda: client.hget(key, file_id))
        file = None if text is None else msgspec.json.decode(text, type=File)
        if file is None or file.expires_at <= time.time():
            raise no_file(file_id)
        return file

    async def pieces(self, tenant: str, file_id: str, size: int) -> AsyncIterator[bytes]:
        """The content, in pieces of any size; raises :class:`FileGoneError` when a piece is missing."""
        client, key, begin = self.guard.client, self.keys.file_pieces(tenant, file_id), 0
        count = await self.guard.run(lambda: client.llen(key))
        step = max(1, _READ_BYTES * count // max(size, 1))
        while size > 0:
            pieces: list[Any] = await self.guard.run(partial(client.lrange, key, begin, begin + step - 1))
            if not pieces:
                raise FileGoneError(file_id)
            begin += len(pieces)
            size -= sum(map(len, pieces))
            yield b"".join(pieces)

    def begin(self, tenant: str) -> Upload:
        """Begin a new file, which the caller writes and publishes."""
        return Upload(self, tenant, new_object_id("file-"))

    async def append(self, tenant: str, file_id: str, piece: bytes) -> None:
        """Append to an unpublished file; raises :class:`ApiError` (413)."""
        keys, limits = self.keys, self.limits
        where = [keys.file_pieces(tenant, file_id), keys.file_sizes, keys.file_usage, keys.file_ends]
        args: list[Argument] = [
            keys.member(tenant, file_id),
            keys.usage_field(tenant),
            limits.tenant,
            limits.total,
            _UPLOAD_LIFE_S,
            piece,
        ]
        answer = await self.guard.run(lambda: self._append(keys=where, args=args))
        if answer == b"tenant":
            raise _full(f"Your files may have at most {limits.tenant} bytes in all; delete some.")
        if answer == b"total":
            raise _full(f"The files of all tenants may have at most {limits.total} bytes.")

    async def publish(self, tenant: str, file: File) -> None:
        """Make a complete file visible; raises :class:`ApiError` (413)."""
        keys, life_s = self.keys, file.expires_at - file.created_at
        args: list[Argument] = [file.id, msgspec.json.encode(file), keys.member(tenant, file.id), life_s, _MOST_FILES]
        if not await self.guard.run(lambda: self._publish(keys=[keys.files(tenant), keys.file_ends], args=args)):
            raise _full(f"You may have at most {_MOST_FILES} files; delete some.")

    async def delete(self, tenant: str, file_id: str, *, only_expired: bool = False) -> bool:
        """Remove a file; returns whether the tenant could see it."""
        keys = self.keys
        where = [
            keys.files(tenant), keys.file_pieces(tenant, file_id), keys.file_sizes, keys.file_usage, keys.file_ends,
        ]  # fmt: skip
        args: list[Argument] = [
            file_id, keys.member(tenant, file_id), keys.usage_field(tenant), int(only_expired),
        ]  # fmt: skip
        return bool(await self.guard.run(lambda: self._remove(keys=where, args=args)))

    async def sweep(self) -> int:
        """Remove expired files; returns the bytes that the remaining ones take."""
        client, keys = self.guard.client, self.keys
        for member in await self.guard.run(lambda: self._expired(keys=[keys.file_ends], args=[_SWEPT])):
            tenant, file_id = keys.parts(member.decode())
            await self.delete(tenant, file_id, only_expired=True)
        return int(await self.guard.run(lambda: client.hget(keys.file_usage, "total")) or 0)


class Upload:
    """A file that is being written, invisible until it is published."""

    def __init__(self, store: FileStore, tenant: str, file_id: str) -> None:
        self._store = store
        self._tenant = tenant
        self._id = file_id
        self._waiting = bytearray()
        self.size = 0

    async def write(self, data: bytes | memoryview) -> None:
        """Append data; raises :class:`ApiError` (413)."""
        self.size += len(data)
        if self.size > self._store.limits.file:
            raise _full(f"A file may have at most {self._store.limits.file} bytes.")
        self._waiting += data
        if len(self._waiting) >= PIECE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        piece, self._waiting = bytes(self._waiting), bytearray()
        await self._store.append(self._tenant, self._id, piece)

    async def publish(self, filename: str, life_s: int | None, purpose: Purpose) -> File:
        """Complete the file and make it visible; raises :class:`ApiError`."""
        if not self.size:
            raise invalid("The file is empty.", "file", "empty_file")
        if self._waiting:
            await self._flush()
        created = int(time.time())
        life = min(life_s or self._store.limits.life_s, self._store.limits.life_s)
        file = File(
            id=self._id, bytes=self.size, created_at=created, expires_at=created + life, filename=filename,
            purpose=purpose,
        )  # fmt: skip
        await self._store.publish(self._tenant, file)
        return file

    async def abort(self) -> None:
        """Remove what was written."""
        await self._store.delete(self._tenant, self._id)


def _full(message: str) -> ApiError:
    return ApiError(413, message, "invalid_request_error", "file", "file_too_large")
