"""An open-loop load on gateways, which says when the generator itself was late, and checks every answer to the byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from tokenizers import Tokenizer

from bench.fleet.workloads import Arrivals, FleetRequest
from services.gateway.generation.poison import CLEARING_TOKENS, MOST_DEATHS

_PATIENCE_S = 180.0
_CLEARED = CLEARING_TOKENS + 8  # tokens; the last ones before a fault may not have arrived
_CLIENTS = 16  # the time that a client takes for a request grows with its open streams


@dataclass(slots=True)
class FleetAnswer:
    """A client's answer to a request; times are seconds."""

    request: FleetRequest
    late_s: float  # between the arrival and its sending: the generator's own delay
    at: float = 0.0  # when it was sent, after the load's begin
    first_token_s: float = 0.0
    seconds: float = 0.0
    text: str = ""
    finish: str = ""
    cached_tokens: int = 0
    error: str = ""
    ended: bool = False
    chunks: int = 0  # received; each has a token or more
    strikes: int = 0  # faults in the fleet from its sending to its end
    struck_at: int = 0  # chunks at the last of them

    def strike(self) -> None:
        """Count a fault in the fleet."""
        self.strikes, self.struck_at = self.strikes + 1, self.chunks

    @property
    def outlived(self) -> bool:
        """Whether it has ended, or grown since the last fault so far that gateways count the deaths from zero again."""
        return self.ended or (self.chunks >= self.struck_at + _CLEARED and self.strikes < MOST_DEATHS - 1)

    @property
    def pace_s(self) -> float:
        """From token to token, on average; 0 for one token."""
        return (self.seconds - self.first_token_s) / max(1, self.request.max_tokens - 1)

    def lost(self) -> bool:
        """Whether the answer did not come whole."""
        return bool(self.error) or not self.finish

    def altered(self, tokenizer: Tokenizer) -> bool:
        """Whether a whole answer differs from the right one."""
        right = tokenizer.decode(list(self.request.answer_ids))
        return not self.lost() and (self.text, self.finish) != (right, "length")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive whatever the answers do; they go to the gateways in turn."""

    urls: Sequence[str]
    model: str
    rate: float  # requests a second
    seconds: float
    sent: list[FleetAnswer] = field(default_factory=list)  # whole or not

    def running(self) -> list[FleetAnswer]:
        """The answers that have not ended."""
        return [answer for answer in self.sent if not answer.ended]

    async def run(
        self, workload: Arrivals, draw: random.Random, meanwhile: asyncio.Task[object] | None = None
    ) -> list[FleetAnswer]:
        """Send requests for `seconds`, and until `meanwhile` is done; wait for their answers.

        A turn of an agent is sent after the turn before has been answered, or else is late.
        """
        async with AsyncExitStack() as stack:
            clients = itertools.cycle([await stack.enter_async_context(_client()) for _ in range(_CLIENTS)])
            further = workload.arrivals(self.rate, draw)
            planned = list(itertools.takewhile(lambda arrival: arrival[0] < self.seconds, further))
            urls = itertools.cycle(self.urls)
            turns: dict[str, asyncio.Task[FleetAnswer]] = {}
            began, tasks = time.monotonic(), []
            for due, request in itertools.chain(planned, further):
                if due >= self.seconds and (meanwhile is None or meanwhile.done()):
                    break
                await asyncio.sleep(max(0.0, began + due - time.monotonic()))
                before = turns.get(request.session) if request.session else None
                answer = FleetAnswer(request, time.monotonic() - began - due)
                task = asyncio.create_task(self._send(next(clients), next(urls), answer, began, before))
                tasks.append(task)
                if request.session:
                    turns[request.session] = task
            return await asyncio.gather(*tasks)

    async def _send(
        self,
        client: httpx.AsyncClient,
        url: str,
        answer: FleetAnswer,
        load_began: float,
        before: asyncio.Task[FleetAnswer] | None,
    ) -> FleetAnswer:
        if before is not None:
            await asyncio.wait([before])
        request, began = answer.request, time.monotonic()
        answer.at = began - load_began
        self.sent.append(answer)
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"session_id": request.session} if request.session else {})
        try:
            async for chunk in _chunks(client, f"{url}/v1/completions", body):
                _take(answer, chunk, began)
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.seconds, answer.ended = time.monotonic() - began, True
        return answer


def most_open(answers: Sequence[FleetAnswer]) -> int:
    """The most answers that were open at a time."""
    changes = sorted([(each.at, 1) for each in answers] + [(each.at + each.seconds, -1) for each in answers])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000)
    return httpx.AsyncClient(trust_env=False, timeout=_PATIENCE_S, limits=limits)


def _take(answer: FleetAnswer, chunk: dict[str, object], began: float) -> None:
    """Add a chunk of the stream to the answer."""
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
    for choice in chunk.get("choices", ()):  # type: ignore[attr-defined]
        answer.chunks += 1
        answer.first_token_s = answer.first_token_s or time.monotonic() - began
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
