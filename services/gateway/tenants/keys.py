"""API keys from a file, the environment, or Redis. Only hashes of them are stored.

File and environment hold the same JSON: a list of records of issued keys (:class:`IssuedKey`), or of objects with
``key_sha256`` (hex) for keys of any other form and the fields of :class:`Tenant`. In Redis an issued key is in the hash
``rz:{namespace}:issued-keys``; the object without ``key_sha256`` is stored under ``rz:{namespace}:key:{sha256}``.
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
from services.common.patterns import END
from services.gateway.errors import ApiError
from services.gateway.tenants.issued import NO_KEY, IssuedKey, PresentedKey
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.tenants.tenant import Tenant, TenantLimits

_KNOWN_S = 1.0  # a change by another gateway takes effect within this time
_UNKNOWN_S = 1.0
_DIGEST_LENGTH = 64
_ID_LENGTH = 12  # as many as an issued key's id has
_MAX_REMEMBERED = 10_000  # bounds the memory that unknown keys can take


class _DigestKey(Tenant, frozen=True, kw_only=True):
    """A tenant that is stored under the digest of its key."""

    key_sha256: str = ""

    @property
    def key_id(self) -> str:
        """See :class:`Tenant`: the beginning of the digest."""
        return self.key_sha256[:_ID_LENGTH]


class _KeyEntry(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}" + END)]

    @property
    def key_id(self) -> str:
        """See :class:`Tenant`: the beginning of the digest."""
        return self.key_sha256[:_ID_LENGTH]


def digest_of(key: str) -> str:
    """The digest of a key, which is stored instead of the key."""
    return sha256(key.encode()).hexdigest()


def read_keys(path: str, inline: str) -> dict[str, Tenant]:
    """Tenants by key digest, and issued keys by id, of a file and of a JSON text; raises :class:`StartupError`."""
    tenants: dict[str, Tenant] = {}
    try:
        texts = ([Path(path).read_bytes().removeprefix(BOM_UTF8)] if path else []) + (
            [inline.encode()] if inline else []
        )
        for text in texts:
            for raw in msgspec.json.decode(text, type=list[dict[str, object]]):
                if "id" in raw:
                    issued = msgspec.convert(raw, IssuedKey)
                    tenants[issued.id] = issued
                else:
                    entry = msgspec.convert(raw, _KeyEntry)
                    tenants[entry.key_sha256] = entry
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"API keys: {error}") from error
    return tenants


class KeyDirectory:
    """Finds the tenant of a key; caches Redis's answers for a while."""

    def __init__(self, fixed: Mapping[str, Tenant], guard: RedisGuard, keys: RedisKeys) -> None:
        self._fixed = fixed
        self._guard = guard
        self._keys = keys
        self._remembered: dict[str, tuple[float, Tenant | None]] = {}
        self._changes = 0  # how often this gateway has changed keys

    async def identify(self, key: str) -> Tenant:
        """The tenant of a key; raises :class:`ApiError` 401, or 503 while Redis is away."""
        presented = PresentedKey.parse(key)
        if presented is None:
            return await self.of_credential(digest_of(key))
        _, tenant = remembered = self._remembered.get(presented.id, (0.0, None))
        issued = await self._opened(presented)
        if issued is None and tenant is not None and self._remembered.get(presented.id) is remembered:
            self._remembered[presented.id] = 0.0, tenant  # another gateway may have given the key a new secret
            issued = await self._opened(presented)
        if issued is None:
            raise unauthorized("The API key is not known.")
        return issued

    def forget(self, key_id: str) -> None:
        """Read an issued key again before its next use: this gateway has changed it."""
        self._changes += 1
        self._remembered.pop(key_id, None)

    @staticmethod
    def credential(key: str) -> str:
        """Return a reference to the tenant without the key: an issued key's id, or another key's digest."""
        presented = PresentedKey.parse(key)
        return presented.id if presented else digest_of(key)

    async def of_credential(self, credential: str) -> Tenant:
        """The tenant of a credential; raises like :meth:`identify`."""
        tenant = await self._find(credential)
        if tenant is None or (isinstance(tenant, IssuedKey) and tenant.until and time.time() >= tenant.until):
            raise unauthorized("The API key is not known.")
        return tenant

    async def _opened(self, presented: PresentedKey) -> IssuedKey | None:
        """The issued key, if the secret opens it."""
        tenant = await self._find(presented.id)
        issued = tenant if isinstance(tenant, IssuedKey) else NO_KEY
        return issued if issued.opens(presented.secret, time.time()) else None

    async def _find(self, credential: str) -> Tenant | None:
        return self._fixed.get(credential) or await self._in_redis(credential)

    async def _in_redis(self, credential: str) -> Tenant | None:
        until, tenant = self._remembered.get(credential, (0.0, None))
        if time.monotonic() < until:
            return tenant
        changes = self._changes
        try:
            tenant = await self._guard.run(lambda: self._read(credential))
        except RedisAwayError as error:
            if tenant is not None:  # use the cached tenant while Redis is away
                return tenant
            message = "API keys cannot be checked at the moment."
            raise ApiError(503, message, "server_error", code="keys_unavailable", retry_after_s=2) from error
        if changes != self._changes:
            return tenant  # it may have been read before the change
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)))
        self._remembered[credential] = (time.monotonic() + (_UNKNOWN_S if tenant is None else _KNOWN_S), tenant)
        return tenant

    async def _read(self, credential: str) -> Tenant | None:
        client = self._guard.client
        if len(credential) != _DIGEST_LENGTH:
            issued = await client.hget(self._keys.issued_keys, credential)
            return None if issued is None else msgspec.json.decode(issued, type=IssuedKey)
        text = await client.get(self._keys.api_key(credential))
        if text is None:
            return None
        return msgspec.structs.replace(msgspec.json.decode(text, type=_DigestKey), key_sha256=credential)


def key_of(authorization: str) -> str:
    """The key in an Authorization header; raises :class:`ApiError` 401."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise unauthorized("An API key is needed: send the header `Authorization: Bearer <key>`.")
    return key.strip()


def unauthorized(message: str) -> ApiError:
    """401, with what a client should send."""
    headers = (("www-authenticate", "Bearer"),)
    return ApiError(401, message, "invalid_request_error", code="invalid_api_key", headers=headers)
