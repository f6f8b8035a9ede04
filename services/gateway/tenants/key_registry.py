"""Creates, changes and removes issued keys in Redis; its gateway follows at once, others within a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from redis.asyncio.client import Pipeline

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.tenants.issued import IssuedKey, PresentedKey, new_id, new_secret, still_valid
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.tenants.tenant import Tenant


class KeyRegistry:
    """All methods raise :class:`RedisAwayError`, and :class:`ApiError` 404 for an unknown id."""

    def __init__(
        self,
        guard: RedisGuard,
        keys: RedisKeys,
        changed: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`changed` gets the id of a key that was changed or removed."""
        self._guard = guard
        self._changed = changed
        self._hash = keys.issued_keys
        self._now = now

    async def all(self) -> list[IssuedKey]:
        """All keys, by the second of their creation, the oldest first."""
        client = self._guard.client
        texts = await self._guard.run(lambda: client.hvals(self._hash))
        return sorted((_decoded(text) for text in texts), key=lambda key: (key.created_at, key.id))

    async def create(self, tenant: Tenant, expires_in_s: float) -> tuple[IssuedKey, str]:
        """Store a new key of a tenant; returns it and what the client sends, which is never seen again."""
        now = self._now()
        secret, hashed = new_secret()
        key = IssuedKey(
            id=new_id(),
            secrets=(hashed,),
            created_at=int(now),
            until=now + expires_in_s if expires_in_s else 0.0,
            **{field: getattr(tenant, field) for field in Tenant.__struct_fields__},
        )
        client = self._guard.client
        await self._guard.run(lambda: client.hset(self._hash, key.id, _encoded(key)))
        return key, str(PresentedKey(key.id, secret))

    async def rotate(self, key_id: str, overlap_s: float) -> tuple[IssuedKey, str]:
        """Give a key a new secret; its older ones end after `overlap_s` seconds, if not earlier."""
        secret, hashed = new_secret()

        def rotated(key: IssuedKey) -> IssuedKey:
            now = self._now()
            end = now + overlap_s
            older = (
                msgspec.structs.replace(one, until=min(one.until or end, end)) for one in still_valid(key.secrets, now)
            )
            return msgspec.structs.replace(key, secrets=(hashed, *(older if overlap_s else ())))

        return await self._change(key_id, rotated), str(PresentedKey(key_id, secret))

    async def limit(self, key_id: str, tenant: Tenant) -> IssuedKey:
        """Replace a key's limits; its name and its secrets stay."""
        fields = {field: getattr(tenant, field) for field in Tenant.__struct_fields__ if field != "name"}
        return await self._change(key_id, lambda key: msgspec.structs.replace(key, **fields))

    async def get(self, key_id: str) -> IssuedKey:
        """One key."""
        client = self._guard.client
        text = await self._guard.run(lambda: client.hget(self._hash, key_id))
        if text is None:
            raise _unknown(key_id)
        return _decoded(text)

    async def revoke(self, key_id: str) -> IssuedKey:
        """Remove a key; returns it."""
        key, client = await self.get(key_id), self._guard.client
        await self._guard.run(lambda: client.hdel(self._hash, key_id))
        self._changed(key_id)
        return key

    async def _change(self, key_id: str, change: Callable[[IssuedKey], IssuedKey]) -> IssuedKey:
        """Change a key unless another gateway changes it at the same time; then read it again."""

        async def attempt(pipe: Pipeline) -> IssuedKey:
            text = await pipe.hget(self._hash, key_id)
            if text is None:
                raise _unknown(key_id)
            changed = change(_decoded(text))
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(self._hash, key_id, _encoded(changed))
            return changed

        changed = await self._guard.change((self._hash,), f"The key {key_id}", attempt)
        self._changed(key_id)
        return changed


def _encoded(key: IssuedKey) -> bytes:
    """A key as it is stored; without a budget, gateways that know no budgets read it."""
    fields = msgspec.to_builtins(key)
    if not key.budget_per_month:
        del fields["budget_per_month"]
    return msgspec.json.encode(fields)


def _decoded(text: bytes | str) -> IssuedKey:
    return msgspec.json.decode(text, type=IssuedKey)


def _unknown(key_id: str) -> ApiError:
    return ApiError(404, f"There is no key {key_id}.", "invalid_request_error", "id", "key_not_found")
