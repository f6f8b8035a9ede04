"""Connections to Redis that fail fast: a caller with a degraded mode wants an answer, not retries."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

Argument = bytes | str | int


def open_redis(url: str, timeout_s: float, *, timed_by_caller: bool = False) -> redis.Redis:
    """A client whose commands answer or raise RedisError/OSError within about `timeout_s`; connects on first use.

    `timed_by_caller`: only connecting is limited here. The client's own limit costs it a task for every command.
    """
    client: redis.Redis = redis.from_url(
        url,
        socket_timeout=None if timed_by_caller else timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return client


class Batcher:
    """Sends commands that are waiting at the same time together, over one connection of its own.

    A command costs redis-py a fifth of a millisecond, most of it per round trip and for taking a connection out of its
    pool and putting it back; and a burst of single commands would open a connection for each.
    """

    def __init__(self, client: redis.Redis, timeout_s: float) -> None:
        self._pool = client.connection_pool
        self._timeout_s = timeout_s
        self._connection: redis.Connection | None = None
        self._waiting: list[tuple[tuple[Argument, ...], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def run(self, *command: Argument) -> Any:
        """The answer to a command as Redis gives it; raises RedisError or OSError, within the time-out."""
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
                async with asyncio.timeout(self._timeout_s):
                    answers = await self._exchange([command for command, _ in batch])
            except (RedisError, OSError) as error:
                if isinstance(error, TimeoutError):  # who waits behind them has waited, too
                    batch, self._waiting = batch + self._waiting, []
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # its caller has given up
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _exchange(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        """The answers in order, errors of single commands among them; the client ends a connection that fails."""
        connection = self._connection
        if connection is None:
            connection = self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _read_answer(connection) for _ in commands]


async def _read_answer(connection: redis.Connection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
