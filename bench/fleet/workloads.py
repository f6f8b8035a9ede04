"""Arrivals of requests: plain ones, ones with a shared prefix, and agents of many turns. Every seed repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.simulated.language import Language

WorkloadName = Literal["plain", "prefix", "agents"]
WORKLOADS: Sequence[WorkloadName] = get_args(WorkloadName)
_PREFIXES = 8  # different system prompts
_TURNS = 8  # turns of an agent
_TURN_TOKENS = 24  # a tool's result


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request of the trace, and its right answer."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    answer_ids: tuple[int, ...]
    session: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request."""

    prompt: int = 256
    prefix: int = 192  # the part of the prompt that requests share
    answer: int = 32


@dataclass(slots=True)
class Workload:
    """A source of requests: each call of `next` returns one."""

    name: WorkloadName
    language: Language
    vocabulary: Sequence[int]
    lengths: Lengths
    draw: random.Random
    _numbers: Iterator[int] = field(default_factory=count)
    _agents: list[tuple[str, list[int], int]] = field(default_factory=list)  # session, known tokens, turns left
    _prefixes: list[list[int]] = field(default_factory=list)

    def next(self) -> FleetRequest:
        """The next request of the trace."""
        makers: dict[WorkloadName, Callable[[], FleetRequest]] = {
            "plain": self._plain,
            "prefix": self._with_prefix,
            "agents": self._turn,
        }
        return makers[self.name]()

    def _tokens(self, n: int) -> list[int]:
        return self.draw.choices(self.vocabulary, k=n)

    def _request(self, prompt: list[int], session: str = "") -> FleetRequest:
        sampling = Sampling(max_tokens=self.lengths.answer)
        answer = self.language.continuation(prompt, sampling)
        return FleetRequest(tuple(prompt), self.lengths.answer, tuple(answer), session)

    def _plain(self) -> FleetRequest:
        return self._request(self._tokens(self.lengths.prompt))

    def _with_prefix(self) -> FleetRequest:
        if not self._prefixes:
            self._prefixes = [self._tokens(self.lengths.prefix) for _ in range(_PREFIXES)]
        own = self._tokens(max(1, self.lengths.prompt - self.lengths.prefix))
        return self._request([*self.draw.choice(self._prefixes), *own])

    def _turn(self) -> FleetRequest:
        """A turn of one of several agents: its prompt is all that was said, and a tool's result."""
        if len(self._agents) < _TURNS or self.draw.random() < 1 / _TURNS:
            self._agents.append((f"agent-{next(self._numbers)}", self._tokens(self.lengths.prompt), _TURNS))
        session, known, left = self._agents.pop(self.draw.randrange(len(self._agents)))
        request = self._request(known, session)
        if left > 1:
            self._agents.append((session, [*known, *request.answer_ids, *self._tokens(_TURN_TOKENS)], left - 1))
        return request
