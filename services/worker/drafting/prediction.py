"""Drafts from the text that the client expects: the field `prediction` of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.drafting.draft import Draft
from services.worker.drafting.ngrams import MAX_MATCH, Cursor, NgramIndex


class PredictionLookup:
    """Follows a prediction from its beginning; after a divergence it finds the way back by n-grams."""

    name = "prediction"

    def __init__(self, prediction_ids: Sequence[int], n_prompt: int) -> None:
        self._prediction = list(prediction_ids)
        self._n_prompt = n_prompt
        self._index = NgramIndex()
        self._cursor = Cursor(n_prompt, following=True)

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """See `Drafter.draft`. The match of the prediction's beginning is 0."""
        self._index.extend(self._prediction)
        cursor = self._cursor
        cursor.follow(self._prediction, token_ids)
        if cursor.match < MAX_MATCH:
            tail = tuple(token_ids[max(self._n_prompt, len(token_ids) - MAX_MATCH) :])
            if not cursor.following:
                cursor.prefer(cursor.nearby(self._prediction, tail))
            cursor.prefer(self._index.find(self._prediction, tail))
        proposed = self._prediction[cursor.position : cursor.position + max(0, most)]
        return Draft(self.name, proposed, cursor.match) if cursor.following and proposed else None
