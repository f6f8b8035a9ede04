"""Finds requests that kill the workers which compute them."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.upstream.connection import WorkerRef

# Tokens beyond the place of a death that clear a request: what kills does so where it is computed again. More than the
# steps in flight and a message that was lost with its worker can account for.
CLEARING_TOKENS = 16
# Deaths at one place before a request is tried without another suspect.
SHARED_DEATHS = 2
# Deaths on trial after the trial's first token: one may be a coincidence, this many at one place are not.
MOST_TRIALS = 3
# A request with so many deaths, at whatever places, is given up.
MOST_DEATHS = 8


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection that broke at `at`, in event-loop time: its worker has died, or lives behind a cut line."""

    worker: WorkerRef
    at: float


@dataclass(frozen=True, slots=True)
class _Death:
    generated: int  # tokens of the request
    alone: bool
    gave: bool
    supposed_by: Broken | None  # None: it is certain


class PoisonDetector:
    """Counts the deaths of workers that computed one request, and decides whether the request is poison.

        free -- two deaths --> on trial -- 16 tokens --> free
                                  on trial -- death before a token, or the third one after some --> convicted

    Many requests are computed together, so a death says little about one of them. After two at one place a request is a
    suspect: workers compute it without another suspect (their quarantine). Poison kills at the place where it has
    killed before, so a death on trial before the first token convicts. After some tokens a death may be a coincidence:
    the request is tried again. A broken connection counts as a death until its worker has outlived it.
    """

    __slots__ = ("_deaths", "_earlier")

    def __init__(self) -> None:
        self._deaths: list[_Death] = []  # since it was last cleared
        self._earlier: list[_Death] = []

    @property
    def trial_tokens(self) -> int:
        """For how many tokens the next worker keeps the request apart from other suspects; 0: not a suspect."""
        return CLEARING_TOKENS if len(self._deaths) >= SHARED_DEATHS else 0

    @property
    def convicted(self) -> bool:
        """Whether the request is poison, if all deaths were ones."""
        trials = [death for death in self._deaths if death.alone]
        guilty = len(trials) >= MOST_TRIALS or any(not death.gave for death in trials)
        return guilty or len(self._earlier) + len(self._deaths) >= MOST_DEATHS

    @property
    def supposed(self) -> list[Broken]:
        """The broken connections whose workers' deaths are supposed."""
        return [death.supposed_by for death in self._earlier + self._deaths if death.supposed_by]

    def died(self, generated: int, *, alone: bool, gave: bool, supposed_by: Broken | None = None) -> None:
        """A worker died while it computed the request; `alone`: without another suspect; `gave`: some tokens."""
        self._deaths.append(_Death(generated, alone, gave, supposed_by))

    def outlived(self, broken: Broken) -> None:
        """The worker lives: its line was cut."""
        self._deaths = [death for death in self._deaths if death.supposed_by != broken]
        self._earlier = [death for death in self._earlier if death.supposed_by != broken]

    def progressed(self, generated: int) -> None:
        """The sequence has `generated` tokens now: far enough beyond the last death it is cleared."""
        if self._deaths and generated >= self._deaths[-1].generated + CLEARING_TOKENS:
            self._earlier += self._deaths
            self._deaths = []
