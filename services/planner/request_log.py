"""Reads the gateways' log of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from redis.asyncio import Redis

from services.common.keys import RedisKeys
from services.common.request_log import LoggedRequest

_PAGE = 1000


async def read_log(redis: Redis, keys: RedisKeys) -> AsyncIterator[LoggedRequest]:
    """All requests of the log, in the order in which they ended. Raises RedisError."""
    since = "-"
    while True:
        answer = await redis.xrange(keys.request_log, min=since, count=_PAGE)
        page = cast("list[tuple[bytes, dict[bytes, bytes]]]", answer)  # no client of ours decodes
        if not page:
            return
        for _, fields in page:
            yield LoggedRequest.read(fields)
        since = f"({page[-1][0].decode()}"
