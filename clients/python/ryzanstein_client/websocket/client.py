"""Streams over WebSocket that outlive their connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, Literal, Unpack
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from ryzanstein_client.errors import RyzansteinError, Unavailable, unreachable
from ryzanstein_client.lifetimes import AsyncClosing
from ryzanstein_client.options import ChatOptions, CompletionOptions
from ryzanstein_client.rest import generations
from ryzanstein_client.rest.answers import error_of_answer
from ryzanstein_client.rest.requests import check_url
from ryzanstein_client.results import Chunk
from ryzanstein_client.retries import Call, Calls
from ryzanstein_client.settings import Message, Prompt, Settings
from ryzanstein_client.streams import AsyncStream
from ryzanstein_client.websocket.generation import Generation

# A resumed stream sends all that was missed as one message.
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class WebSocketClient(AsyncClosing):
    """Streams from `/v1/stream`: after a lost connection they go on, on a new one, where they were.

    Every stream has a connection of its own, so that a slow reader holds up nothing but its own stream. `url` is
    ``ws://host:port`` or ``wss://host:port``; ``http`` and ``https``, as the REST clients take, mean the same.
    `timeout_s` is exact.
    """

    def __init__(self, url: str = "ws://127.0.0.1:8000", settings: Settings | None = None) -> None:
        self._url = f"{_websocket_url(url)}/v1/stream"
        self._settings = settings or Settings()
        self._calls = Calls(self._settings.retries, self._settings.timeout_s)
        self._open: set[ClientConnection] = set()
        self._closed = False

    def stream_completion(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> AsyncStream:
        """Continue a text or token ids; chunks as they come."""
        body = generations.completion_body(self._settings, prompt, options)
        return self._stream("completion", body, options.get("timeout_s"))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answer a conversation; chunks as they come."""
        body = generations.chat_body(self._settings, messages, options)
        return self._stream("chat", body, options.get("timeout_s"))

    async def aclose(self) -> None:
        """Cancel all streams and close their connections."""
        self._closed = True
        for socket in tuple(self._open):
            await _cancel(socket)
            await socket.close()

    def _stream(
        self, kind: Literal["chat", "completion"], body: Mapping[str, Any], timeout_s: float | None
    ) -> AsyncStream:
        async def source(call: Call) -> AsyncGenerator[Chunk, None]:
            generation = Generation(kind, body)
            while not generation.ended:
                try:
                    async with aclosing(self._follow(generation)) as chunks:
                        async for chunk in chunks:
                            call.progressed()
                            yield chunk
                except Unavailable as error:
                    if self._closed or generation.ended or not generation.resumable:
                        raise  # nothing to resume: whether it is begun again is for AsyncStream to say
                    await asyncio.sleep(call.pause_after(error, resumes=True))

        return AsyncStream(source, partial(self._calls.begin, timeout_s))

    async def _follow(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """Chunks of a generation until it or the connection ends; the latter raises :class:`Unavailable`."""
        async with self._connection() as socket:
            try:
                await socket.send(generation.opening())
                async for message in socket:
                    chunk = generation.read(message)
                    if chunk is not None:
                        yield chunk
                    if generation.ended:
                        return
                raise unreachable("the server closed the connection")
            except ConnectionClosed as error:
                raise unreachable(f"the connection was lost: {error}") from error
            finally:
                if not generation.ended:
                    await _cancel(socket)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[ClientConnection]:
        tls: dict[str, Any] = {} if self._settings.tls is None else {"ssl": self._settings.tls}
        if self._closed:
            raise RuntimeError("the client is closed")
        try:
            socket = await connect(
                self._url,
                additional_headers=_headers(self._settings),
                open_timeout=self._settings.connect_timeout_s,
                max_size=_MAX_MESSAGE_BYTES,
                proxy=True if self._settings.use_proxies else None,
                **tls,
            )
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise _refusal(error) from error
        self._open.add(socket)
        try:
            yield socket
        finally:
            self._open.discard(socket)
            await socket.close()


def _websocket_url(url: str) -> str:
    parts = urlsplit(check_url(url, ("ws", "wss", "http", "https")))
    return parts._replace(scheme={"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)).geturl()


async def _cancel(socket: ClientConnection) -> None:
    """Without this the server would go on generating for a while, in wait for a resumption."""
    with suppress(ConnectionClosed):
        await socket.send(Generation.cancellation())


def _headers(settings: Settings) -> dict[str, str]:
    return {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}


def _refusal(error: Exception) -> RyzansteinError:
    """The error of a handshake that failed."""
    if isinstance(error, InvalidStatus):
        response = error.response
        headers = {name.lower(): value for name, value in response.headers.raw_items()}
        return error_of_answer(response.status_code, headers, bytes(response.body or b""))
    return unreachable(f"the connection failed: {error or type(error).__name__}")
