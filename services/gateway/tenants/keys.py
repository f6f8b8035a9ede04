"""API keys from a file, the environment, or Redis. Only their SHA-256 is stored.

File and environment hold the same JSON: a list of objects with ``key_sha256`` (hex) and the fields of
:class:`Tenant`. In Redis the object without ``key_sha256`` is stored under ``rz:{namespace}:key:{sha256}``.
"""

from __future__ import annotations

import time
from codecs import BOM_UTF8
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError
from services.gateway.errors import ApiError
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.tenants.tenant import Tenant

_KNOWN_S = 1.0  # a change of a key takes effect within this time
_UNKNOWN_S = 1.0
_MAX_REMEMBERED = 10_000  # bounds the memory that unknown keys can take


class _KeyEntry(Tenant, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def digest_of(key: str) -> str:
    """The digest of a key, which is stored instead of the key."""
    return sha256(key.encode()).hexdigest()


def read_keys(path: str, inline: str) -> dict[str, Tenant]:
    """Tenants by key digest from a file and from a JSON text; raises :class:`StartupError`."""
    found: dict[str, Tenant] = {}
    try:
        texts = ([Path(path).read_bytes().removeprefix(BOM_UTF8)] if path else []) + (
            [inline.encode()] if inline else []
        )
        for text in texts:
            entries = msgspec.json.decode(text, type=list[_KeyEntry])
            found |= {entry.key_sha256: entry for entry in entries}
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"API keys: {error}") from error
    return found


class KeyDirectory:
    """Finds the tenant of a key; caches Redis's answers for a while."""

    def __init__(self, fixed: Mapping[str, Tenant], guard: RedisGuard | None, keys: RedisKeys) -> None:
        self._fixed = fixed
        self._guard = guard
        self._keys = keys
        self._remembered: dict[str, tuple[float, Tenant | None]] = {}

    async def identify(self, authorization: str) -> Tenant:
        """The tenant of an Authorization header; raises :class:`ApiError` 401, or 503 while Redis is away."""
        return await self.of_digest(digest_of(key_of(authorization)))

    async def of_digest(self, digest: str) -> Tenant:
        """The tenant of a key, by its digest; raises like :meth:`identify`."""
        tenant = self._fixed.get(digest) or await self._in_redis(digest)
        if tenant is None:
            raise _unauthorized("The API key is not known.")
        return tenant

    async def _in_redis(self, digest: str) -> Tenant | None:
        if self._guard is None:
            return None
        until, tenant = self._remembered.get(digest, (0.0, None))
        if time.monotonic() < until:
            return tenant
        client = self._guard.client
        try:
            text = await self._guard.run(lambda: client.get(self._keys.api_key(digest)))
        except RedisAwayError as error:
            if tenant is not None:  # use the cached tenant while Redis is away
                return tenant
            message = "API keys cannot be checked at the moment."
            raise ApiError(503, message, "server_error", code="keys_unavailable", retry_after_s=2) from error
        tenant = None if text is None else msgspec.json.decode(text, type=Tenant)
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)))
        self._remembered[digest] = (time.monotonic() + (_UNKNOWN_S if tenant is None else _KNOWN_S), tenant)
        return tenant


def key_of(authorization: str) -> str:
    """The key in an Authorization header; raises :class:`ApiError` 401."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("An API key is needed: send the header `Authorization: Bearer <key>`.")
    return key.strip()


def _unauthorized(message: str) -> ApiError:
    headers = (("www-authenticate", "Bearer"),)
    return ApiError(401, message, "invalid_request_error", code="invalid_api_key", headers=headers)
