"""Keeps a generation and its output beyond the end of the connection that started it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from services.common.tasks import end_tasks
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.output import OutputChunk
from services.gateway.observation import CLIENT_GONE, ObservedRequest
from services.gateway.tenants.tenant import Tenant
from services.gateway.tools.calls import call_deltas
from services.gateway.usage import usage_json
from services.gateway.websocket.protocol import CANCELLED, SingleSequence

log = logging.getLogger(__name__)


class ReplayBuffer:
    """Runs one sequence to its end, and keeps its output, which the model's context bounds."""

    def __init__(
        self,
        request: AdmittedRequest,
        kind: SingleSequence[Any],
        held: AsyncExitStack,
        observed: ObservedRequest,
        drain: Drain,
    ) -> None:
        """Start a task that runs the sequence and then exits `held`, the context of the started request."""
        self.token = secrets.token_urlsafe(16)
        self.tenant = request.tenant.name
        self.chunks: list[OutputChunk] = []
        self.error: ApiError | None = None
        self.finish: str | None = None
        self._starts: list[int] = []  # the token index at which each chunk begins
        self._tokens = 0
        self._request = request
        self._kind = kind
        self._held = held
        self._observed = observed
        self._drain = drain
        self._on_news: Callable[[], None] = lambda: None
        request.on_start = lambda _: self._on_news()
        self._task = asyncio.create_task(self._run())

    @property
    def model(self) -> str:
        """The model that answers."""
        return self._request.model.name

    @property
    def ended(self) -> bool:
        """Whether the generation has ended."""
        return self.finish is not None or self.error is not None

    def position_of(self, token_index: int) -> int:
        """The index of the chunk with a token, or of the next chunk; text after the last token is also a chunk."""
        if token_index >= self._tokens:
            return bisect_left(self._starts, self._tokens)
        return bisect_right(self._starts, token_index) - 1

    def message(self, name: str, position: int) -> dict[str, Any]:
        """All chunks from `position` on, as one token message."""
        chunks, prepared = self.chunks[position:], self._request.prepared
        ids = [token_id for chunk in chunks for token_id in chunk.ids]
        text = "".join(chunk.text for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        message = {"type": "token", "id": name, "index": self._starts[position], "text": text, "ids": ids}
        takeovers = [chunk.takeover for chunk in chunks if chunk.takeover is not None]
        if takeovers and prepared.include_workers:
            message["worker"] = takeovers[-1].json()
        if tokens:
            message["logprobs"] = self._kind.logprobs(prepared, tokens)
        if reasoning := "".join(chunk.reasoning for chunk in chunks):
            message["reasoning_content"] = reasoning
        if calls := call_deltas(call for chunk in chunks for call in chunk.calls):
            message["tool_calls"] = calls
        return message

    def beginning(self, name: str) -> dict[str, Any]:
        """The `started` message."""
        prompt_tokens = len(self._request.prepared.generations[0].request.prompt_ids)
        ignored = self._request.ignored.header
        return {
            "type": "started", "id": name, "token": self.token, "model": self.model, "prompt_tokens": prompt_tokens,
            **({"ignored": ignored} if ignored else {}),
        }  # fmt: skip

    def ending(self, name: str) -> dict[str, Any]:
        """The `done` or `error` message."""
        if self.error is not None:
            return {"type": "error", "id": name, **self.error.body()}
        used = self._request.used
        usage = usage_json(used) | ({"cost": used.cost} if self._request.prepared.include_cost else {})
        return {"type": "done", "id": name, "finish_reason": self.finish, "usage": usage}

    def follow(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` at each change; replaces the previous listener."""
        self._on_news = on_news

    async def cancel(self) -> None:
        """Stop generating."""
        await asyncio.sleep(0)  # a task that is cancelled before its first step would skip its `finally`
        await end_tasks([self._task])

    async def _run(self) -> None:
        self._observed.attach()
        try:
            async with self._drain.limit():
                await self._fill()
        except ApiError as error:
            self.error = error
        except Exception:  # a bug ends only this generation
            log.exception("generation failed")
            self.error = internal_error()
        finally:
            if not self.ended:
                self.finish = CANCELLED
            self._request.close()
            if self.error is not None and self.chunks:
                self._observed.broken(self.error)
            self._observed.end(self._status(), self.model)
            try:
                await self._held.aclose()  # counts what it used, before the client hears of its end
            finally:
                self._on_news()

    async def _fill(self) -> None:
        async with aclosing(self._request.chunks()) as chunks:
            async for _, chunk in chunks:
                self._starts.append(self._tokens)
                self.chunks.append(chunk)
                self._tokens += len(chunk.ids)
                if chunk.finish is None:
                    self._on_news()
                else:
                    self.finish = chunk.finish

    def _status(self) -> int:
        if self.error is not None:
            return self.error.status
        return CLIENT_GONE if self.finish == CANCELLED else 200


class ReplayBuffers:
    """Generations by resume token. A generation without a listener is dropped after `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._by_token: dict[str, ReplayBuffer] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, buffer: ReplayBuffer) -> None:
        """Add a generation."""
        self._by_token[buffer.token] = buffer

    def take(self, token: str, tenant: Tenant) -> ReplayBuffer:
        """The generation of a resume token, for a new listener; raises :class:`ApiError`."""
        buffer = self._by_token.get(token)
        if buffer is None or buffer.tenant != tenant.name:
            message = "No generation has this token; it may have been given up. Start it again."
            raise ApiError(404, message, "invalid_request_error", "token", "unknown_generation")
        if timer := self._timers.pop(token, None):
            timer.cancel()
        return buffer

    def release(self, buffer: ReplayBuffer) -> None:
        """Keep a generation without a listener for `window_s`."""
        buffer.follow(lambda: None)
        loop = asyncio.get_running_loop()
        if old := self._timers.pop(buffer.token, None):
            old.cancel()
        self._timers[buffer.token] = loop.call_later(self._window_s, self._give_up, buffer)

    def _give_up(self, buffer: ReplayBuffer) -> None:
        self._timers.pop(buffer.token, None)
        self._by_token.pop(buffer.token, None)
        task = asyncio.get_running_loop().create_task(buffer.cancel())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def give_up_lost(self) -> None:
        """Drop generations without a listener, now and in future, since no new connection can resume them."""
        self._window_s = 0.0
        for token, timer in list(self._timers.items()):
            timer.cancel()
            self._give_up(self._by_token[token])

    async def aclose(self) -> None:
        """Drop all generations."""
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*(buffer.cancel() for buffer in self._by_token.values()))
