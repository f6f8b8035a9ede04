"""Tells routers how far the download of a model is, before a worker has a lease."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.redis_client import open_redis
from services.common.redis_outage import RedisOutage
from services.common.settings import ServiceSettings
from services.common.tasks import end_tasks

REPORT_S = 1.0
KEPT_S = 5  # routers forget the download so long after the last report
_TIMEOUT_S = 0.5

log = logging.getLogger(__name__)


class DownloadProgress(Protocol):
    """A download."""

    @property
    def done(self) -> int:
        """Bytes that are there."""

    @property
    def total(self) -> int:
        """Bytes of all files."""


@asynccontextmanager
async def reporting(settings: ServiceSettings, model: str) -> AsyncIterator[Callable[[DownloadProgress], None]]:
    """Yield a callback for the begin of the model's download, which is reported until the end of the block.

    An outage of Redis is logged, and hinders no download.
    """
    tasks: list[asyncio.Task[None]] = []
    client = open_redis(settings.redis, _TIMEOUT_S)
    try:
        yield lambda progress: tasks.append(asyncio.create_task(_report(client, settings, model, progress)))
    finally:
        await end_tasks(tasks)
        await client.aclose()


async def _report(client: redis.Redis, settings: ServiceSettings, model: str, progress: DownloadProgress) -> None:
    outage = RedisOutage(log, settings.redis, "the download is not reported")
    key = RedisKeys(settings.namespace).download(model)
    while True:
        text = json.dumps({"done": progress.done, "of": progress.total})
        try:
            await client.set(key, text, ex=KEPT_S)
            outage.ended()
        except (RedisError, OSError) as error:
            outage.failed(error)
        await asyncio.sleep(REPORT_S)
