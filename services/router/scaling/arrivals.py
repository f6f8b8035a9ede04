"""The requests that this router is placing, and has placed: the part of the demand that workers do not report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ryzanstein.v1 import routing_pb2

# Half-life of the arriving tokens: a few requests more or less in a second make no difference.
HALF_LIFE_S = 15.0
_MEAN_LIFE_S = HALF_LIFE_S / math.log(2)


@dataclass(slots=True)
class Arriving:
    """The requests of one model. Times are seconds of the monotonic clock."""

    last_at: float
    held: int = 0  # requests that are being placed
    held_tokens: int = 0  # their prompts
    tokens: float = 0.0  # computed prompt tokens of placed requests, decayed
    decayed_at: float = 0.0

    def placed(self, tokens: float, now: float) -> None:
        """Count the prompt tokens that a worker computes for a placed request."""
        self.tokens = self.tokens_at(now) + tokens
        self.decayed_at = now

    def tokens_at(self, now: float) -> float:
        """The decayed tokens."""
        return self.tokens * math.exp2(min(self.decayed_at - now, 0.0) / HALF_LIFE_S)


@dataclass(slots=True)
class _Placing:
    """A request that is being placed. Its own class, since a generator as a context manager takes longer."""

    arriving: Arriving
    prompt_tokens: int
    clock: Callable[[], float]

    def __enter__(self) -> Arriving:
        self.arriving.held += 1
        self.arriving.held_tokens += self.prompt_tokens
        return self.arriving

    def __exit__(self, *error: object) -> None:
        self.arriving.held -= 1
        self.arriving.held_tokens -= self.prompt_tokens
        self.arriving.last_at = self.clock()


class Arrivals:
    """Counts requests by model."""

    def __init__(self, router_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._router_id = router_id
        self._clock = clock
        self._began = clock()
        self._models: dict[str, Arriving] = {}

    def placing(self, model: str | None, prompt_tokens: int) -> AbstractContextManager[Arriving]:
        """A request is held for as long as the block lasts. None: its model is not known, and not counted."""
        return _Placing(Arriving(self._clock()) if model is None else self._of(model), prompt_tokens, self._clock)

    def _of(self, model: str) -> Arriving:
        if model not in self._models:
            self._models[model] = Arriving(self._clock())
        return self._models[model]

    def forget(self, models: Iterable[str]) -> None:
        """Drop models that no longer exist."""
        for model in models:
            self._models.pop(model, None)

    def demand(self, models: Iterable[str]) -> routing_pb2.GetDemandResponse:
        """The demand for `models` at this router."""
        now = self._clock()
        of_models = [self._demand(model, now) for model in models]
        return routing_pb2.GetDemandResponse(router_id=self._router_id, models=of_models)

    def _demand(self, model: str, now: float) -> routing_pb2.ModelDemand:
        arriving = self._models.get(model)
        if arriving is None:
            return routing_pb2.ModelDemand(model=model, idle_s=now - self._began)
        return routing_pb2.ModelDemand(
            model=model,
            held=arriving.held,
            held_tokens=arriving.held_tokens,
            tokens_per_s=arriving.tokens_at(now) / _MEAN_LIFE_S,
            idle_s=0.0 if arriving.held else now - arriving.last_at,
        )
