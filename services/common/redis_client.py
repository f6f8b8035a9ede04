"""Connections to Redis that fail fast: callers have a degraded mode, and prefer an error to retries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError, ResponseError

Argument = bytes | str | int

# Connecting resolves a name, starts TLS and logs in, which may take longer than a command may. It runs in its own task.
CONNECT_TIMEOUT_S = 2.0


class RedisUrlError(ValueError):
    """A URL is not a valid URL of a Redis; the message contains no part of it."""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Address and credentials of Redis. The URL may contain user and password, percent-encoded; fields override it."""

    url: str
    username: str = ""
    password: str = ""
    password_file: str = ""
    ca_file: str = ""

    def check(self) -> None:
        """Raise RedisUrlError unless the URL is valid."""
        try:
            parts = urlsplit(self.url)
            port, path = parts.port, parts.path.strip("/")
        except ValueError:
            raise RedisUrlError(_WRONG_URL) from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise RedisUrlError("must start with redis://, rediss:// or unix://")
        if parts.scheme == "unix":
            ok = bool(path)
        else:  # a later @ means an unencoded password: the host would be wrong
            ok = (
                bool(parts.hostname)
                and port != 0
                and (not path or path.isdigit())
                and "@" not in parts.query + parts.fragment
            )
        try:
            if ok:
                redis.ConnectionPool.from_url(self.url).make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RedisError):
            ok = False
        if not ok:
            raise RedisUrlError(_WRONG_URL)

    @property
    def host(self) -> str:
        """The host; empty for a Unix socket."""
        return urlsplit(self.url).hostname or ""

    @property
    def place(self) -> str:
        """Host and port, or the path of the Unix socket; contains no secret."""
        parts = urlsplit(self.url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.url.startswith("rediss://")

    @property
    def user(self) -> str:
        """The ACL user; empty: Redis's default user."""
        return self.username or unquote(urlsplit(self.url).username or "")

    @property
    def password_source(self) -> str:
        """The environment variable with the password; empty without a password."""
        if self.password_file:
            return "RYZANSTEIN_REDIS_PASSWORD_FILE"
        if self.password:
            return "RYZANSTEIN_REDIS_PASSWORD"
        return "RYZANSTEIN_REDIS_URL" if urlsplit(self.url).password else ""

    def read_password(self) -> str:
        """The password, or empty; raises AuthenticationError if the file cannot be read."""
        if not self.password_file:
            return self.password or unquote(urlsplit(self.url).password or "")
        try:
            return Path(self.password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise AuthenticationError(f"RYZANSTEIN_REDIS_PASSWORD_FILE cannot be read: {error}") from error


_WRONG_URL = (
    "must be redis://[user:password@]host[:port][/number], rediss:// alike, or unix:///path; a password with special "
    "characters belongs into RYZANSTEIN_REDIS_PASSWORD, or is percent-encoded here"
)


class _Credentials(CredentialProvider):
    """Credentials, read at every connect since the password file may change."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        user, password = self._access.user, self._access.read_password()
        return (user, password) if user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


class _Verifying(redis.SSLConnection):
    """TLS that reads its CAs at every connect, since the file may change."""

    async def connect(self) -> None:
        """Connect unless connected."""
        if not self.is_connected:
            self.ssl_context.context = None  # forget the files that an earlier connect read
        await super().connect()  # type: ignore[no-untyped-call]


class _ConnectingBeside(redis.ConnectionPool):
    """Finishes connecting even if its caller has given up, so that the next caller finds the connection ready."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._keeping: set[asyncio.Task[None]] = set()

    async def get_connection(self, *_deprecated: Any, **_options: Any) -> redis.Connection:
        """An idle connection, or a new one."""
        idle = self._available_connections
        if idle and idle[-1].is_connected:
            ready: redis.Connection = await super().get_connection()  # type: ignore[no-untyped-call]
            return ready
        connecting: asyncio.Task[redis.Connection] = asyncio.create_task(super().get_connection())  # type: ignore[no-untyped-call]
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._keep)
            raise

    def _keep(self, connected: asyncio.Task[redis.Connection]) -> None:
        if not connected.cancelled() and not connected.exception():
            keeping = asyncio.create_task(self.release(connected.result()))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)


def open_redis(
    access: RedisAccess, timeout_s: float, *, timed_by_caller: bool = False, connects_beside: bool = False
) -> redis.Redis:
    """A client whose commands return or raise RedisError/OSError within about `timeout_s`; connects on first use.

    `timed_by_caller`, for a Batcher: the client has no time-outs of its own, which would cost a task per command.
    `connects_beside`: connecting may take longer than `timeout_s`, and continues after its caller has given up.
    """
    parts = urlsplit(access.url)
    # Without the client library's name, which is a command that the chart's users may not send.
    options: dict[str, Any] = {"driver_info": None} | ({"ssl_ca_certs": access.ca_file} if access.ca_file else {})
    if access.user or access.password_source:
        options["credential_provider"] = _Credentials(access)
    connect_s = CONNECT_TIMEOUT_S if connects_beside else timeout_s
    pool = (_ConnectingBeside if connects_beside else redis.ConnectionPool).from_url(
        parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
        socket_timeout=None if timed_by_caller else timeout_s,
        socket_connect_timeout=None if timed_by_caller else connect_s,
        retry=Retry(NoBackoff(), 0),
        **options,
    )
    if access.encrypted:
        pool.connection_class = _Verifying
    return redis.Redis.from_pool(pool)


class Batcher:
    """Sends waiting commands together, over one connection of its own.

    A single command costs redis-py a fifth of a millisecond, most of it for the round trip and for the connection pool;
    and a burst of single commands would open a connection for each.
    """

    def __init__(self, client: redis.Redis, timeout_s: float) -> None:
        self._pool = client.connection_pool
        self._timeout_s = timeout_s
        self._connection: redis.Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[tuple[tuple[Argument, ...], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def run(self, *command: Argument) -> Any:
        """Redis's answer to a command; raises RedisError or OSError within the time-out."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    def connect(self) -> asyncio.Task[None] | None:
        """Start to connect unless connected, so that no command has to wait for it; return the task."""
        if self._connecting is not None and not self._connecting.done():
            return self._connecting  # `is_connected` is true before authentication has ended
        if self._connection is not None and self._connection.is_connected:
            return None
        self._connecting = asyncio.create_task(self._connect(), name="redis-connect")
        # Marks the exception as retrieved: waiting commands get it.
        self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._connecting

    async def _connect(self) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self._connection is None:
                self._connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            else:
                await self._connection.connect()  # type: ignore[no-untyped-call]

    async def _send(self) -> None:
        """Send batches one after another; new commands gather meanwhile."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                async with asyncio.timeout(self._timeout_s):
                    answers = await self._exchange([command for command, _ in batch])
            except (RedisError, OSError) as error:
                if isinstance(error, TimeoutError):  # later commands have waited as well
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
        """The answers in order, errors of single commands included; the client closes a connection that fails."""
        if connecting := self.connect():
            await asyncio.shield(connecting)  # continues after the time-out of these commands
        connection = self._connection
        assert connection is not None
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _read_answer(connection) for _ in commands]


async def _read_answer(connection: redis.Connection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
