"""Conversations of many tenants with an installation, and what can be said of where their turns were computed."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httpx
import redis.asyncio as redis

from services.common.keys import RedisKeys
from services.router.sessions import decode

BLOCK = 16  # tokens; what prefix caches share is whole blocks
TENANTS = ["hot", *(f"tenant-{i}" for i in range(7))]
HOT_SHARE = 0.5  # of the sessions


@dataclass(frozen=True)
class Load:
    """What clients do all the time; lengths are tokens."""

    clients: int
    turns: int
    system: int
    question: int
    answer: int
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """One answered question; times are of the monotonic clock."""

    session: str
    worker: str
    began: float
    first_token: float
    prompt: int
    hit: int
    ideal: int
    output: int

    @property
    def work(self) -> int:
        """Tokens that its worker had to compute."""
        return self.prompt - self.hit + self.output


def ideal_hit(prompt: Sequence[int], earlier: Iterable[Sequence[int]], block: int = BLOCK) -> int:
    """Tokens of `prompt` that need not be computed where all of `earlier` has been: whole blocks, never all of it."""
    most = 0
    for known in earlier:
        pairs = enumerate(zip(prompt, known, strict=False))
        common = next((i for i, (one, other) in pairs if one != other), min(len(prompt), len(known)))
        most = max(most, common)
    return min(most, len(prompt) - 1) // block * block


def imbalance(amounts: Iterable[float]) -> float:
    """How far the largest is above the mean; 0 is even. Raises ValueError when there is nothing to divide."""
    values = list(amounts)
    if not sum(values):
        raise ValueError("no work was done")
    return max(values) / (sum(values) / len(values)) - 1


def kept_share(turns: Sequence[Turn]) -> float:
    """Share of turns, but the first of each session, on the worker of the turn before. `turns` are in order of time."""
    last: dict[str, str] = {}
    same = later = 0
    for turn in turns:
        if turn.session in last:
            later += 1
            same += turn.worker == last[turn.session]
        last[turn.session] = turn.worker
    return same / later if later else 1.0


@dataclass
class Clients:
    """Conversations with one installation, until cancelled."""

    http: httpx.AsyncClient
    bindings: redis.Redis
    keys: RedisKeys
    load: Load
    turns: list[Turn] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)  # tenants that have sent the system prompt before

    async def converse(self, index: int) -> None:
        """One client: session after session."""
        rng = random.Random(f"{self.load.seed} {index}")
        system = _draw(random.Random(self.load.seed), self.load.system)
        for number in range(sys.maxsize):
            tenant = TENANTS[0] if rng.random() < HOT_SHARE else rng.choice(TENANTS[1:])
            session, known, prompt = f"{index}-{number}", list[int](), system
            for _ in range(self.load.turns):
                prompt = prompt + _draw(rng, self.load.question)
                earlier = [known, system] if tenant in self._asked else [known]
                self._asked.add(tenant)
                answer = await self._ask(tenant, session, prompt, ideal_hit(prompt, earlier))
                prompt = prompt + answer
                known = prompt[:-1]  # nobody has computed the token that was drawn last

    async def _ask(self, tenant: str, session: str, prompt: list[int], ideal: int) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": self.load.answer,
            "ignore_eos": True,
            "temperature": 0,
            "session_id": session,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw, first, began = b"", 0.0, time.monotonic()
        headers = {"authorization": f"Bearer {tenant}"}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            async for chunk in response.aiter_raw():
                first = first or time.monotonic()
                raw += chunk
        if response.status_code != httpx.codes.OK or b'data: {"error"' in raw or b"data: [DONE]" not in raw:
            raise RuntimeError(f"a turn failed: {response.status_code} {raw[-300:].decode(errors='replace')}")
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
        hit = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        held = await self.bindings.get(self.keys.session(tenant, session))
        binding = decode(held).binding if isinstance(held, bytes) else None
        if binding is None:
            raise RuntimeError(f"session {session} is bound to no worker")
        self.turns.append(Turn(session, binding.worker_id, began, first, len(prompt), hit, ideal, len(ids)))
        return ids


def _draw(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(300, 4_000) for _ in range(n)]
