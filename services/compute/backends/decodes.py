"""Decodes as a whole: what a device captures from the ids of tokens to the tokens that are drawn."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.compute.backends.batch import StepNumbers
from services.compute.backends.draws import DrawNumbers, DrawRows


class Tokens(Protocol):
    """The tokens that a rank draws on its device, by slot. All computations can be captured."""

    spare: int  # a slot of no request

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return `token_ids` [n] with the tokens that references in it stand for (`StepNumbers.token_ids`)."""

    def draw(self, logits: Tensor, draws: DrawRows) -> Tensor:
        """Draw a token per row of `logits` [n, vocab_local], and keep it in its slot: [n] int64."""


class Decodes(Protocol):
    """Replays steps with one row per sequence, all of them in one cache."""

    def serves(self, numbers: StepNumbers) -> bool:
        """Whether `forward` can replay or capture this step."""

    def forward(self, numbers: StepNumbers, drawn: DrawNumbers | None) -> Tensor:
        """Compute a step that is served, given what its rows draw by, all of them and from all tokens: [n] int64.

        Without `drawn` nothing is drawn: the hidden states after the final norm [n, hidden_size]. Either is valid
        until the next step.
        """


class NoDecodes:
    """Serves no step."""

    def serves(self, numbers: StepNumbers) -> bool:
        """Return False."""
        return False

    def forward(self, numbers: StepNumbers, drawn: DrawNumbers | None) -> Tensor:
        """Raises NotImplementedError."""
        raise NotImplementedError("no step is replayed here")
