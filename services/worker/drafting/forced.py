"""Drafts of what a grammar leaves no choice about: a schema's keys and punctuation."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.drafting.draft import Draft

CERTAIN = 1 << 20  # match of a forced draft; longer than that of any text


class ForcedTokens:
    """Proposes the tokens that the request's grammar forces, as the last result says."""

    name = "grammar"

    def __init__(self) -> None:
        self._forced: tuple[int, ...] = ()
        self._n_tokens = 0

    def force(self, token_ids: tuple[int, ...], n_tokens: int) -> None:
        """Propose `token_ids` after the first `n_tokens` tokens of the text."""
        self._forced, self._n_tokens = token_ids, n_tokens

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """See `Drafter.draft`. No draft for a text of another length than the forced tokens follow."""
        proposed = self._forced[: max(0, most)] if len(token_ids) == self._n_tokens else ()
        return Draft(self.name, proposed, CERTAIN) if proposed else None
