"""Durations of earlier starts in Redis, so that a router that has just started estimates as the one before it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess
from services.common.redis_outage import RedisOutage
from services.router.starts import PAST_STARTS, STAGES, Durations, Starts

KEPT_S = 30 * 86_400  # durations of a model are dropped so long after its last start
LOOK_S = 1.0

log = logging.getLogger(__name__)


class StartHistory:
    """Reads the durations of each model once, and writes those of a model after each of its starts.

    Routers see the same starts, so the last writer's durations hold. While Redis is away, all is tried again.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RedisKeys,
        access: RedisAccess,
        starts: Starts,
        models: Callable[[], Collection[str]],
    ) -> None:
        self._client, self._keys, self._starts, self._models = client, keys, starts, models
        self._read: set[str] = set()  # models
        self._outage = RedisOutage(log, access, "durations of starts are not kept")

    async def run(self) -> None:
        """Read and write until cancelled."""
        while True:
            try:
                await self._follow()
                self._outage.ended()
            except (RedisError, OSError) as error:
                self._outage.failed(error)
            await asyncio.sleep(LOOK_S)

    async def _follow(self) -> None:
        models = set(self._models())
        self._read &= models
        for model in models - self._read:
            if stored := await self._client.get(self._keys.start_durations(model)):
                self._starts.recall(model, decode(stored))
            self._read.add(model)
        for model in self._starts.measured & self._read:
            durations = json.dumps(self._starts.durations(model))
            self._starts.measured.discard(model)
            try:
                await self._client.set(self._keys.start_durations(model), durations, ex=KEPT_S)
            except (RedisError, OSError):
                self._starts.measured.add(model)
                raise


def decode(stored: bytes | str) -> Durations:
    """The durations of a stored value. Stages and values that this release does not know are left out."""
    try:
        by_stage = json.loads(stored)
    except ValueError as error:
        log.warning("durations of starts ignored: %s", error)
        return {}
    if not isinstance(by_stage, dict):
        log.warning("durations of starts ignored: %s", str(by_stage)[:100])
        return {}
    return {
        stage: [float(one) for one in seconds if _is_duration(one)][-PAST_STARTS:]
        for stage, seconds in by_stage.items()
        if stage in STAGES and isinstance(seconds, list)
    }


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
