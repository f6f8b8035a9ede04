"""Answers of deterministic requests, kept in Redis as tokens: every API can be served from them.

Deterministic means temperature 0 or a fixed seed. The key covers everything that the tokens depend on, and the tenant.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256

import msgspec

from services.common.keys import RedisKeys
from services.gateway.generation.request import GenerationRequest
from services.gateway.generation.tokens import FinishReason, TokenBatch, TokenSource
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard


class _Entry(msgspec.Struct, array_like=True):
    ids: list[int]
    finish: FinishReason


def cacheable(request: GenerationRequest) -> bool:
    """Whether the answer can be kept: it is the same every time, and nothing but tokens."""
    options = request.options
    scored = options.logprobs is not None or options.prompt_logprobs is not None
    return options.deterministic and not scored and not request.embed


def digest_of(request: GenerationRequest) -> str:
    """The key of an answer."""
    sampling = request.options.to_proto()
    if request.options.temperature == 0:
        sampling.seed = 0  # it has no influence
    card = request.model.card
    parts = (
        card.hash_root,
        request.caller.tenant,
        request.prompt_ids,
        sampling.SerializeToString(deterministic=True),
        request.options.stop,
        [image.digest for image in request.images],
    )
    return sha256(msgspec.msgpack.encode(parts)).hexdigest()


class ResponseCache:
    """Looks answers up and keeps new ones."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys, ttl_s: int, metrics: GatewayMetrics) -> None:
        self._guard = guard
        self._keys = keys
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._writes: set[asyncio.Task[None]] = set()

    def wrap(self, request: GenerationRequest, live: TokenSource) -> TokenSource:
        """A source that answers from the cache, or from `live` and into the cache."""
        return _CachedSource(request, live, self) if cacheable(request) else live

    async def get(self, digest: str) -> TokenBatch | None:
        """A kept answer."""
        client = self._guard.client
        try:
            data = await self._guard.run(lambda: client.get(self._keys.response(digest)))
        except RedisAwayError:
            data = None
        self._metrics.cache.labels("miss" if data is None else "hit").inc()
        if data is None:
            return None
        assert isinstance(data, bytes)  # the client does not decode
        entry = msgspec.msgpack.decode(data, type=_Entry)
        return TokenBatch(entry.ids, finish=entry.finish)

    def put(self, digest: str, ids: list[int], finish: FinishReason) -> None:
        """Keep an answer; does not wait."""
        data = msgspec.msgpack.encode(_Entry(ids, finish))
        task = asyncio.create_task(self._write(self._keys.response(digest), data))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, key: str, data: bytes) -> None:
        client = self._guard.client
        try:
            await self._guard.run(lambda: client.set(key, data, ex=self._ttl_s))
        except RedisAwayError:
            return  # the next request computes it again


class _CachedSource:
    """A :class:`TokenSource` in front of another one."""

    def __init__(self, request: GenerationRequest, live: TokenSource, cache: ResponseCache) -> None:
        self._live = live
        self._cache = cache
        self._digest = digest_of(request)
        self._ids: list[int] = []
        self._looked_up = False
        self._done = False

    @property
    def cached_tokens(self) -> int:
        """See :class:`TokenSource`."""
        return self._live.cached_tokens

    async def next(self) -> TokenBatch:
        """See :class:`TokenSource`."""
        if not self._looked_up:
            self._looked_up = True
            cached = await self._cache.get(self._digest)
            if cached is not None:
                self._done = True
                return cached
        batch = await self._live.next()
        self._ids += batch.ids
        if batch.finish is not None:
            self._keep(batch.finish)
        return batch

    def close(self, *, complete: bool = False) -> None:
        """See :class:`TokenSource`."""
        if complete:
            # A stop string ended the text and the same tokens will find it again. STOP would say that the last token
            # is a stop token, which adds no text.
            self._keep(FinishReason.LENGTH)
        self._live.close(complete=complete)

    def _keep(self, finish: FinishReason) -> None:
        if not self._done:
            self._done = True
            self._cache.put(self._digest, self._ids, finish)
