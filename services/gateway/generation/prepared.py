"""The sequences that a body asks for, before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.generation.output import Generation
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

MAX_CHOICES = 128  # sequences of a request: prompts times n


class Prepared(Struct, frozen=True):
    """All sequences of a request; none runs before its first chunk is asked for."""

    request_id: str
    model: ServedModel
    generations: list[Generation]
    billed: Callable[[Generation], Usage]
    per_prompt: int = 1  # choices that share a prompt: it is counted once
    include_workers: bool = False
    include_cost: bool = False

    def usage(self) -> Usage:
        """The tokens that the sequences have used so far; a prompt counts once one of its sequences has begun."""
        total, counted = Usage(), -1  # the last prompt that was counted
        for index, generation in enumerate(self.generations):
            if not generation.begun:
                continue
            usage, prompt = self.billed(generation), index // self.per_prompt
            total += usage if prompt != counted else replace(usage, prompt_tokens=0, cached_tokens=0)
            counted = prompt
        return total

    def reserved_tokens(self) -> int:
        """The most that the sequences can use."""
        prompts = self.generations[:: self.per_prompt]
        return sum(len(generation.request.prompt_ids) for generation in prompts) + sum(
            generation.request.options.max_tokens for generation in self.generations
        )

    def close(self) -> None:
        """Stop whatever still runs."""
        for generation in self.generations:
            generation.close()


class GeneratingBody(Protocol):
    """The fields that the bodies of all generating endpoints have."""

    @property
    def model(self) -> str | None:
        """The model asked for."""

    @property
    def priority(self) -> int | None:
        """The priority asked for."""

    @property
    def keep_alive(self) -> str | float | None:
        """How long the model stays awake after the request."""

    @property
    def stream(self) -> bool | None:
        """Whether the client asks for a stream."""

    @property
    def session(self) -> str:
        """The session, whose requests go to one worker; empty when the body names none."""


Body = TypeVar("Body", bound=GeneratingBody, contravariant=True)


class Preparer(Protocol[Body]):
    """The part of generation that differs between endpoints."""

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Prepared:
        """The sequences of a body; raises :class:`ApiError`."""
