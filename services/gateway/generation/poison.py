"""Finds requests that kill the workers which compute them."""

from __future__ import annotations

# Tokens beyond the place of a death that clear a request: what kills does so where it is computed again. More than the
# steps in flight and a message that was lost with its worker can account for.
CLEARING_TOKENS = 16
# Deaths at one place before a request is tried without another suspect.
SHARED_DEATHS = 2
# Deaths on trial after the trial's first token: one may be a coincidence, this many at one place are not.
MOST_TRIALS = 3
# A request with so many deaths, at whatever places, is given up.
MOST_DEATHS = 8


class PoisonDetector:
    """Counts the deaths of workers that computed one request, and decides whether the request is poison.

        free -- two deaths --> on trial -- 16 tokens --> free
                                  on trial -- death before a token, or the third one after some --> convicted

    Many requests are computed together, so a death says little about one of them. After two at one place a request is a
    suspect: workers compute it without another suspect (their quarantine). Poison kills at the place where it has
    killed before, so a death on trial before the first token convicts. After some tokens a death may be a coincidence:
    the request is tried again.
    """

    __slots__ = ("_deaths", "_died_at", "_total", "_trials", "convicted")

    def __init__(self) -> None:
        self._deaths = 0  # since it was last cleared
        self._trials = 0  # deaths on trial among these
        self._total = 0
        self._died_at = 0  # tokens generated at the last death
        self.convicted = False

    @property
    def trial_tokens(self) -> int:
        """For how many tokens the next worker keeps the request apart from other suspects; 0: not a suspect."""
        return CLEARING_TOKENS if self._deaths >= SHARED_DEATHS else 0

    def died(self, generated: int, *, alone: bool, gave: bool) -> None:
        """A worker died while it computed the request; `alone`: without another suspect; `gave`: some tokens."""
        self._deaths += 1
        self._total += 1
        self._trials += alone
        self._died_at = generated
        guilty = alone and (not gave or self._trials >= MOST_TRIALS)
        self.convicted = guilty or self._total >= MOST_DEATHS

    def progressed(self, generated: int) -> None:
        """The sequence has `generated` tokens now: far enough beyond the last death it is cleared."""
        if self._deaths and generated >= self._died_at + CLEARING_TOKENS:
            self._deaths = self._trials = 0
