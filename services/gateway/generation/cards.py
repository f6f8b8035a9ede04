"""Models' cards in Redis, which all gateways share: see :mod:`services.gateway.upstream.cards`."""

from __future__ import annotations

import asyncio
import logging
import time

from services.common.keys import RedisKeys
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.upstream.cards import StoredCard

log = logging.getLogger(__name__)

MAX_CARDS = 32  # the ones that were written first make room
MAX_CARD_BYTES = 16 * 1024 * 1024  # compressed; tokenizers of large vocabularies take some 5 MB

# Keys: cards, digests, times of writing.
_WRITE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
for _, oldest in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1 - ARGV[5])) do
  redis.call('HDEL', KEYS[1], oldest)
  redis.call('HDEL', KEYS[2], oldest)
  redis.call('ZREM', KEYS[3], oldest)
end
"""


class CardStore:
    """See :class:`Cards`."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys) -> None:
        self._guard = guard
        self._keys = keys
        self._write = guard.client.register_script(_WRITE)
        self._unusable: set[tuple[str, str]] = set()  # models and digests, each logged once

    async def digests(self) -> dict[str, str] | None:
        """See :class:`Cards`."""
        client = self._guard.client
        try:
            stored = await self._guard.run(lambda: client.hgetall(self._keys.card_digests))
        except RedisAwayError:
            return None
        return {_text(name): _text(digest) for name, digest in stored.items()}

    async def read(self, model: str) -> StoredCard | None:
        """See :class:`Cards`."""
        client = self._guard.client
        try:
            packed = await self._guard.run(lambda: client.hget(self._keys.cards, model))
            return await asyncio.to_thread(StoredCard.unpack, packed) if isinstance(packed, bytes) else None
        except RedisAwayError:
            return None
        except ValueError as error:
            self._complain(model, "", f"cannot be read: {error}")
            return None

    async def write(self, stored: StoredCard) -> bool:
        """See :class:`Cards`; a card that is too large is never stored, and logged once."""
        model = stored.card.model
        if (model, stored.digest) in self._unusable:
            return True
        packed = await asyncio.to_thread(stored.pack)
        if len(packed) > MAX_CARD_BYTES:
            self._complain(model, stored.digest, f"is not stored: it takes {len(packed)} of {MAX_CARD_BYTES} bytes")
            return True
        keys = [self._keys.cards, self._keys.card_digests, self._keys.card_times]
        args: list[str | bytes | float] = [model, stored.digest, packed, time.time(), MAX_CARDS]
        try:
            await self._guard.run(lambda: self._write(keys=keys, args=args))
        except RedisAwayError:
            return False
        return True

    def _complain(self, model: str, digest: str, trouble: str) -> None:
        if (model, digest) not in self._unusable:
            self._unusable.add((model, digest))
            log.warning("the card of %s %s", model, trouble)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()
