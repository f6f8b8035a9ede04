"""Drafts from the request's own text: answers repeat what stands in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.drafting.draft import Draft
from services.worker.drafting.ngrams import MAX_MATCH, Cursor, NgramIndex


class PromptLookup:
    """Proposes the tokens after the latest earlier occurrence of the text's last tokens.

    A place that is followed is left only for a longer match.
    """

    name = "prompt_lookup"

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._cursor = Cursor(0, following=False)

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """See `Drafter.draft`. A draft that reaches the end of the text goes on with its own beginning."""
        self._index.extend(token_ids)
        cursor = self._cursor
        cursor.follow(token_ids, token_ids)
        if cursor.match < MAX_MATCH:
            cursor.prefer(self._index.find(token_ids, tuple(token_ids[-MAX_MATCH:])))
        if most < 1 or not cursor.following:
            return None
        proposed = token_ids[cursor.position : cursor.position + most]
        while len(proposed) < most:
            proposed = [*proposed, *proposed[: most - len(proposed)]]
        return Draft(self.name, proposed, cursor.match)
