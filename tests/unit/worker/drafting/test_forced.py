"""Drafts of forced tokens hold for one length of the text."""

from __future__ import annotations

from services.worker.drafting.forced import ForcedTokens
from services.worker.drafting.ngrams import MAX_MATCH


def test_forced_tokens_are_proposed_for_one_length_of_the_text() -> None:
    drafter = ForcedTokens()
    text = [1, 2, 3]
    assert drafter.draft([], 4) is None
    assert drafter.draft(text, 4) is None
    drafter.force((4, 5, 6), len(text))
    draft = drafter.draft(text, 2)
    assert draft is not None
    assert (draft.drafter, tuple(draft.token_ids)) == ("grammar", (4, 5))
    assert draft.match > MAX_MATCH, "surer than any text"
    assert drafter.draft(text, 0) is None
    text.append(4)
    assert drafter.draft(text, 2) is None
    drafter.force((), len(text))
    assert drafter.draft(text, 2) is None
