"""Connections to Redis that fail fast: a caller with a degraded mode wants an answer, not retries."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

Argument = bytes | str | int


def open_redis(url: str, timeout_s: float) -> redis.Redis:
    """A client whose commands answer or raise RedisError/OSError within about `timeout_s`; connects on first use."""
    client: redis.Redis = redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return client


class Batcher:
    """Sends commands that are waiting at the same time as one pipeline, over one connection.

    A command costs redis-py a fifth of a millisecond, most of it per round trip, and a burst of single commands would
    open a connection for each.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._waiting: list[tuple[tuple[Argument, ...], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def run(self, *command: Argument) -> Any:
        """The answer to a command as Redis gives it; raises RedisError or OSError."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        """While a batch is on its way the next one gathers."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for command, _ in batch:
                        pipe.execute_command(*command)
                    answers = await pipe.execute(raise_on_error=False)
            except (RedisError, OSError) as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # its caller has given up
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
