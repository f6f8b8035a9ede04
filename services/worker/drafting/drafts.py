"""A request's drafters, and what became of their proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.drafting.draft import Draft, Drafter
from services.worker.drafting.forced import ForcedTokens

_FADING = 0.98  # weight of the older drafts, with each new one


@dataclass(slots=True)
class Evidence:
    """Counts of proposals: verified, and accepted of these."""

    verified: float = 0.0
    stood: float = 0.0

    def add(self, n_proposed: int, n_accepted: int) -> None:
        """Learn from a draft. Proposals after a rejected one are no evidence."""
        self.verified = self.verified * _FADING + min(n_proposed, n_accepted + 1)
        self.stood = self.stood * _FADING + n_accepted

    def probability(self, before: float, weight: float) -> float:
        """The estimate, where `before` was estimated without this evidence."""
        return (self.stood + weight * before) / (self.verified + weight)


@dataclass(slots=True)
class Drafts:
    """A request's drafters, and the counts of its proposals."""

    drafters: Sequence[Drafter]
    own: dict[str, Evidence] = field(default_factory=dict)  # by drafter
    seen: int = -1  # number of tokens that `newest` follows
    newest: Sequence[Draft] = ()  # the drafters' proposals
    carried: Draft | None = None  # proposals of the step in flight
    untried: Draft | None = None  # not carried; its first token is compared with the drawn one all the same
    forced: ForcedTokens | None = None  # one of the drafters, for a request with a grammar

    def after(self, token_ids: Sequence[int], most: int) -> Sequence[Draft]:
        """The drafters' proposals for the request's tokens so far."""
        if self.seen != len(token_ids):
            self.seen = len(token_ids)
            self.newest = [draft for drafter in self.drafters if (draft := drafter.draft(token_ids, most)) is not None]
        return self.newest
