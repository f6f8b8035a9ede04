"""Whether a request kills the workers that compute it."""

from __future__ import annotations

# Tokens beyond the place of a death that clear a request: what kills does so where it is computed again. More than the
# steps in flight and a message that was lost with its worker can account for.
ACQUITTED_TOKENS = 16
# Deaths on trial after the trial's first token: one may be a coincidence, so many at one place are none.
MOST_TRIALS = 3
# Whoever dies with its workers so often, at whatever places, is given up.
MOST_DEATHS = 8


class Suspicion:
    """The deaths of workers that one request has part in.

        free -- shared_deaths --> on trial -- 16 tokens --> free
                                  on trial -- death before a token, or the third one after some --> convicted

    Many requests are computed together, so a death says little about one of them. After `shared_deaths` at one place a
    request is a suspect: workers compute it beside no other suspect. What kills does so where it killed before, so a
    trial that gives no token convicts. One that gave some and died may have met with bad luck: it is tried again.
    """

    __slots__ = ("_deaths", "_died_at", "_shared_deaths", "_total", "_trials", "convicted")

    def __init__(self, shared_deaths: int) -> None:
        self._shared_deaths = shared_deaths
        self._deaths = 0  # since it was last cleared
        self._trials = 0  # of these, on trial
        self._total = 0
        self._died_at = 0  # tokens generated at the last death
        self.convicted = False

    @property
    def trial_tokens(self) -> int:
        """What the next worker is told: how long to compute the request beside no other suspect; 0: none."""
        return ACQUITTED_TOKENS if self._deaths >= self._shared_deaths else 0

    def died(self, generated: int, *, alone: bool, gave: bool) -> None:
        """A worker died while it computed the request; `alone`: beside no other suspect; `gave`: some tokens."""
        self._deaths += 1
        self._total += 1
        self._trials += alone
        self._died_at = generated
        guilty = alone and (not gave or self._trials >= MOST_TRIALS)
        self.convicted = guilty or self._total >= MOST_DEATHS

    def progressed(self, generated: int) -> None:
        """So many tokens are there now."""
        if self._deaths and generated >= self._died_at + ACQUITTED_TOKENS:
            self._deaths = self._trials = 0
