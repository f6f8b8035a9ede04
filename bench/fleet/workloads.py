"""Requests of a load: plain ones, ones with a shared prefix, long ones, agents of many turns. Every seed repeats."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.simulated.language import Language

WorkloadName = Literal["plain", "prefix", "agents", "long"]
WORKLOADS: Sequence[WorkloadName] = get_args(WorkloadName)
_PREFIXES = 8  # different system prompts
_TURNS = 8  # turns of an agent
AGENTS = 8  # that take turns
_TURN_TOKENS = 24  # a tool's result
_DOCUMENTS = 2  # different long documents
_LONG_SHARE = 0.1  # share of requests that ask about one
_QUESTION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request of the trace, and its right answer."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    answer_ids: tuple[int, ...]
    session: str = ""

    @classmethod
    def of(cls, language: Language, prompt: Sequence[int], max_tokens: int, session: str = "") -> FleetRequest:
        """A request with the answer that simulated workers have to give."""
        answer = language.continuation(prompt, Sampling(max_tokens=max_tokens))
        return cls(tuple(prompt), max_tokens, tuple(answer), session)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request."""

    prompt: int = 256
    prefix: int = 192  # the part of the prompt that requests share
    answer: int = 32
    document: int = 100_000  # the shared part of a long prompt

    def longest(self, name: WorkloadName) -> int:
        """The tokens of the longest request of a workload, its answer included."""
        grown = (_TURNS - 1) * (self.answer + _TURN_TOKENS) if name == "agents" else 0
        longest = max(self.prompt, self.document + _QUESTION_TOKENS) if name == "long" else self.prompt
        return longest + grown + self.answer


class Arrivals(Protocol):
    """Requests by the times at which they come."""

    @property
    def name(self) -> str:
        """The name in the report."""
        ...

    @property
    def language(self) -> Language:
        """The language of the answers."""
        ...

    def arrivals(self, rate: float, draw: random.Random) -> Iterator[tuple[float, FleetRequest]]:
        """Seconds from the load's begin, and the request that comes then."""
        ...


@dataclass(slots=True)
class Workload:
    """A source of requests without end: each call of `next` returns one."""

    name: WorkloadName
    language: Language
    vocabulary: Sequence[int]
    lengths: Lengths
    draw: random.Random
    n_agents: int = AGENTS  # that take turns
    _begun: int = 0  # agents
    _agents: deque[tuple[str, list[int], int]] = field(default_factory=deque)  # session, known tokens, turns left
    _prefixes: list[list[int]] = field(default_factory=list)
    _documents: list[list[int]] = field(default_factory=list)

    def arrivals(self, rate: float, draw: random.Random) -> Iterator[tuple[float, FleetRequest]]:
        """Arrivals of a Poisson process."""
        at = 0.0
        while True:
            at += draw.expovariate(rate)
            yield at, self.next()

    def next(self) -> FleetRequest:
        """The next request of the trace."""
        makers: dict[WorkloadName, Callable[[], FleetRequest]] = {
            "plain": self._plain,
            "prefix": self._with_prefix,
            "agents": self._turn,
            "long": self._plain_or_long,
        }
        return makers[self.name]()

    def _tokens(self, n: int) -> list[int]:
        return self.draw.choices(self.vocabulary, k=n)

    def _request(self, prompt: list[int], session: str = "") -> FleetRequest:
        return FleetRequest.of(self.language, prompt, self.lengths.answer, session)

    def _plain(self) -> FleetRequest:
        return self._request(self._tokens(self.lengths.prompt))

    def _with_prefix(self) -> FleetRequest:
        if not self._prefixes:
            self._prefixes = [self._tokens(self.lengths.prefix) for _ in range(_PREFIXES)]
        own = self._tokens(max(1, self.lengths.prompt - self.lengths.prefix))
        return self._request([*self.draw.choice(self._prefixes), *own])

    def _plain_or_long(self) -> FleetRequest:
        """A few requests ask about a long document, between plain ones."""
        if not self._documents:
            self._documents = [self._tokens(self.lengths.document) for _ in range(_DOCUMENTS)]
        if self.draw.random() >= _LONG_SHARE:
            return self._plain()
        return self._request([*self.draw.choice(self._documents), *self._tokens(_QUESTION_TOKENS)])

    def _turn(self) -> FleetRequest:
        """A turn of a new agent, or of the one that has waited the longest.

        Its prompt is all that was said, and a tool's result.
        """
        if len(self._agents) < self.n_agents or self.draw.random() < 1 / _TURNS:
            session, known, left = f"agent-{self._begun}", self._tokens(self.lengths.prompt), _TURNS
            self._begun += 1
        else:
            session, known, left = self._agents.popleft()
        request = self._request(known, session)
        if left > 1:
            self._agents.append((session, [*known, *request.answer_ids, *self._tokens(_TURN_TOKENS)], left - 1))
        return request
