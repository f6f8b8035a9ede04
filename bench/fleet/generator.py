"""Sends a share of a load, says when it was late itself, and knows which answers bear another fault."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import ssl
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx

from bench.fleet.interruptions import Blow
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.workloads import FleetRequest

_CLIENTS, _STREAMS_OF_A_CLIENT = 16, 64  # the time that a client takes for a request grows with its open streams


@dataclass(frozen=True, slots=True)
class Share:
    """One of `of` equal parts of a load; the turns of a session are in one."""

    number: int = 0
    of: int = 1

    def has(self, position: int, request: FleetRequest) -> bool:
        """Whether a request, by its position in the load, is in this part."""
        key = zlib.crc32(request.session.encode()) if request.session else position
        return key % self.of == self.number


class Generator:
    """Sends the requests of a share when they arrive, and gathers their answers."""

    def __init__(self, load: Load, share: Share) -> None:
        self._load, self._share = load, share
        self._sent: list[FleetAnswer] = []  # whole or not
        self._began = 0.0
        self._room = asyncio.Semaphore(math.ceil(load.streams / share.of) or sys.maxsize)

    def bears(self, blow: Blow) -> bool:
        """Whether no request would be given up if the blow struck now."""
        return all(answer.interruptions.bears(blow) for answer in self._open())

    def strike(self, blow: Blow) -> int:
        """Count a blow; returns the number of open answers."""
        answers, now = self._open(), time.monotonic()
        for answer in answers:
            answer.interruptions.strike(blow, now)
        return len(answers)

    async def run(self, arrivals: Iterator[tuple[float, FleetRequest]], end: asyncio.Event) -> list[FleetAnswer]:
        """Send requests for the load's seconds, and until `end` is set; wait for their answers.

        While as many streams as may be are open, the arrivals stand still. A turn of an agent is sent after the turn
        before has been answered.
        """
        async with AsyncExitStack() as stack:
            clients = itertools.cycle([await stack.enter_async_context(one) for one in self._clients()])
            turns: dict[str, asyncio.Task[FleetAnswer]] = {}
            self._began, held_s, tasks = time.monotonic(), 0.0, []
            for position, (due, request) in enumerate(arrivals):
                if self._over(due + held_s, end):
                    break
                if not self._share.has(position, request):
                    continue
                await asyncio.sleep(max(0.0, self._began + held_s + due - time.monotonic()))
                held_s += await self._wait_for_room()
                if self._over(due + held_s, end):
                    break
                answer = FleetAnswer(request, time.monotonic() - self._began - held_s - due)
                url = self._load.urls[position % len(self._load.urls)]
                before = turns.get(request.session) if request.session else None
                task = asyncio.create_task(self._send(next(clients), url, answer, before))
                task.add_done_callback(lambda _: self._room.release())
                tasks.append(task)
                if request.session:
                    turns[request.session] = task
            return await asyncio.gather(*tasks)

    def _open(self) -> list[FleetAnswer]:
        return [answer for answer in self._sent if not answer.ended]

    def _over(self, at_s: float, end: asyncio.Event) -> bool:
        return at_s >= self._load.seconds and end.is_set()

    async def _wait_for_room(self) -> float:
        """Take room for a stream; returns the seconds without any."""
        if not self._room.locked():
            await self._room.acquire()
            return 0.0
        began = time.monotonic()
        await self._room.acquire()
        return time.monotonic() - began

    def _clients(self) -> Iterator[httpx.AsyncClient]:
        certificates = ssl.create_default_context()  # reading them for each client would take seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000)
        n_clients = math.ceil(self._load.streams / self._share.of / _STREAMS_OF_A_CLIENT)
        for _ in range(max(_CLIENTS, n_clients)):
            yield httpx.AsyncClient(trust_env=False, timeout=self._load.patience_s, limits=limits, verify=certificates)

    async def _send(
        self, client: httpx.AsyncClient, url: str, answer: FleetAnswer, before: asyncio.Task[FleetAnswer] | None
    ) -> FleetAnswer:
        if before is not None:
            await asyncio.wait([before])
        began = time.monotonic()
        answer.at = began - self._began
        self._sent.append(answer)
        try:
            async with asyncio.timeout(self._load.patience_s) as patience:
                async for chunk in _chunks(client, f"{url}/v1/completions", _body(self._load.model, answer.request)):
                    patience.reschedule(asyncio.get_running_loop().time() + self._load.patience_s)
                    _take(answer, chunk, began)
        except TimeoutError:
            answer.error = f"no token for {self._load.patience_s:g} s, after {len(answer.text)} letters"
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.seconds, answer.ended = time.monotonic() - began, True
        return answer


def _body(model: str, request: FleetRequest) -> dict[str, object]:
    body = {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_workers": True},
    }
    return body | ({"session_id": request.session} if request.session else {})


def _take(answer: FleetAnswer, chunk: dict[str, object], began: float) -> None:
    """Add a chunk of the stream to the answer."""
    now = time.monotonic()
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
    for choice in chunk.get("choices", ()):  # type: ignore[attr-defined]
        worker = choice.get("worker") or {}
        answer.interruptions.grew(now, worker.get("id", ""), worker.get("attempt", 0))
        answer.first_token_s = answer.first_token_s or now - began
        answer.text += choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish
    if isinstance(usage := chunk.get("usage"), dict):
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def _chunks(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    """The chunks of a stream. Raises httpx.HTTPError; ValueError for a refusal."""
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])
