"""A generation and everything it has produced: it outlives the connection that started it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from services.gateway.api.generate import Made
from services.gateway.drain import Drain
from services.gateway.errors import ApiError, internal_error
from services.gateway.generation.output import Chunk, Generation, usage_json
from services.gateway.observation import CLIENT_GONE, ObservedRequest
from services.gateway.realtime.protocol import CANCELLED
from services.gateway.tenants.tenant import Admission, Tenant
from services.gateway.tools.calls import call_deltas

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A job and the request it was let in for."""

    made: Made
    admission: Admission

    @property
    def generation(self) -> Generation:
        return self.made.job.generations[0]

    async def end(self) -> None:
        """Stop it, and give back what was reserved and not used."""
        self.made.job.close()
        await self.admission.settle(self.made.job.usage())


FallBack = Callable[[Made, ApiError], Awaitable[Made]]


class Recording:
    """Runs one sequence to its end. What it keeps is bounded by the model's context."""

    def __init__(
        self,
        tenant: Tenant,
        made: Made,
        admission: Admission,
        fall_back: FallBack,
        observed: ObservedRequest,
        drain: Drain,
    ) -> None:
        """Runs in a task of its own, which settles the admission."""
        self.token = secrets.token_urlsafe(16)
        self.tenant = tenant.name
        self.chunks: list[Chunk] = []
        self.error: ApiError | None = None
        self.finish: str | None = None
        self._starts: list[int] = []  # token index at which each chunk begins
        self._tokens = 0
        self._running = _Running(made, admission)
        self._fall_back = fall_back
        self._observed = observed
        self._drain = drain
        self._on_news: Callable[[], None] = lambda: None
        self._task = asyncio.create_task(self._run())

    @property
    def model(self) -> str:
        """The model that answers."""
        return self._running.made.model.name

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish is not None or self.error is not None

    def position_of(self, token_index: int) -> int:
        """The chunk that holds a token, or the next one; text released after the last token counts as next."""
        if token_index >= self._tokens:
            return bisect_left(self._starts, self._tokens)
        return bisect_right(self._starts, token_index) - 1

    def message(self, name: str, position: int) -> dict[str, Any]:
        """All chunks from `position` on as one token message."""
        chunks = self.chunks[position:]
        ids = [token_id for chunk in chunks for token_id in chunk.ids]
        text = "".join(chunk.text for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        message = {"type": "token", "id": name, "index": self._starts[position], "text": text, "ids": ids}
        takeovers = [chunk.takeover for chunk in chunks if chunk.takeover is not None]
        if takeovers and self._running.made.job.include_workers:
            message["worker"] = takeovers[-1].json()
        if tokens:
            message["logprobs"] = self._running.made.job.dialect.logprobs(0, tokens)
        if reasoning := "".join(chunk.reasoning for chunk in chunks):
            message["reasoning_content"] = reasoning
        if calls := call_deltas(call for chunk in chunks for call in chunk.calls):
            message["tool_calls"] = calls
        return message

    def beginning(self, name: str) -> dict[str, Any]:
        """The message before the first token."""
        prompt_tokens = len(self._running.generation.request.prompt_ids)
        return {
            "type": "started", "id": name, "token": self.token, "model": self.model, "prompt_tokens": prompt_tokens,
        }  # fmt: skip

    def ending(self, name: str) -> dict[str, Any]:
        """The message after the last token."""
        if self.error is not None:
            return {"type": "error", "id": name, **self.error.body()}
        usage = usage_json(self._running.made.job.usage())
        return {"type": "done", "id": name, "finish_reason": self.finish, "usage": usage}

    def follow(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` whenever there is something new; replaces the follower before."""
        self._on_news = on_news

    async def cancel(self) -> None:
        """Stop generating."""
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not run its end
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        self._observed.attach()
        try:
            async with self._drain.limit():
                await self._record_or_fall_back()
        except ApiError as error:
            self.error = error
        except Exception:
            log.exception("generation failed")
            self.error = internal_error()
        finally:
            if not self.ended:
                self.finish = CANCELLED
            self._running.made.job.close()
            if self.error is not None and self.chunks:
                self._observed.broken(self.error)
            self._observed.end(self._status(), self.model)
            self._on_news()
            await self._running.end()

    async def _record_or_fall_back(self) -> None:
        try:
            await self._record()
        except ApiError as error:
            if self.chunks:
                raise
            made = await self._fall_back(self._running.made, error)
            self._running.made.job.close()
            self._running = _Running(made, self._running.admission)
            await self._running.admission.reserve(made.job.reserved_tokens())
            self._on_news()
            await self._record()

    async def _record(self) -> None:
        finish = None
        while finish is None:
            chunk = await self._running.generation.next()
            self._starts.append(self._tokens)
            self.chunks.append(chunk)
            self._tokens += len(chunk.ids)
            finish = chunk.finish
            if finish is None:
                self._on_news()
        self.finish = finish

    def _status(self) -> int:
        if self.error is not None:
            return self.error.status
        return CLIENT_GONE if self.finish == CANCELLED else 200


class Recordings:
    """Generations by resume token. One without a follower is given up after `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._by_token: dict[str, Recording] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, recording: Recording) -> None:
        """Make a generation known."""
        self._by_token[recording.token] = recording

    def take(self, token: str, tenant: Tenant) -> Recording:
        """The generation of a token, which then has a follower again; raises :class:`ApiError`."""
        recording = self._by_token.get(token)
        if recording is None or recording.tenant != tenant.name:
            message = "No generation has this token; it may have been given up. Start it again."
            raise ApiError(404, message, "invalid_request_error", "token", "unknown_generation")
        if timer := self._timers.pop(token, None):
            timer.cancel()
        return recording

    def release(self, recording: Recording) -> None:
        """Nobody follows a generation any more: keep it for a while."""
        recording.follow(lambda: None)
        loop = asyncio.get_running_loop()
        if old := self._timers.pop(recording.token, None):
            old.cancel()
        self._timers[recording.token] = loop.call_later(self._window_s, self._give_up, recording)

    def _give_up(self, recording: Recording) -> None:
        self._timers.pop(recording.token, None)
        self._by_token.pop(recording.token, None)
        task = asyncio.get_running_loop().create_task(recording.cancel())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def give_up_lost(self) -> None:
        """Give up what has no follower, and from now on at once: no connection can come to resume it."""
        self._window_s = 0.0
        for token, timer in list(self._timers.items()):
            timer.cancel()
            self._give_up(self._by_token[token])

    async def aclose(self) -> None:
        """Give everything up."""
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*(recording.cancel() for recording in self._by_token.values()))
