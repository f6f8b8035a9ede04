"""Follows the list of adapters in Redis: those that are pinned should be loaded here before they are asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.adapters import read_registered
from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
from services.worker.engine.request import AdapterRef

PAUSE_S = 2.0

log = logging.getLogger(__name__)


async def follow_pins(
    client: redis.Redis, keys: RedisKeys, access: RedisAccess, model: str, pin: Callable[[Sequence[AdapterRef]], None]
) -> None:
    """Call `pin` with the pinned adapters of `model` after every read, until cancelled."""
    outage = RedisOutage(log, access, "pinned adapters not read")
    while True:
        try:
            registered = read_registered(await client.hgetall(keys.adapters))
        except (RedisError, OSError) as error:
            outage.failed(error)
        except ValueError as error:
            log.warning("%s: %s", keys.adapters, error)
        else:
            outage.ended()
            pinned = (one for one in registered.values() if one.pinned and one.base == model)
            pin(tuple(AdapterRef(one.digest, one.source, one.name) for one in sorted(pinned, key=lambda one: one.name)))
        await asyncio.sleep(PAUSE_S)
