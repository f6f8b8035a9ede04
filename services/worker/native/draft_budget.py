"""The time that drafts may lose, in steps of about the same number of decodes, and the measured cost of a draft.

Drafts are judged by their outcome. A step with proposals, or whose plan waited for some in vain, is compared with the
time that its tokens would have taken without any. The difference, a gain or a loss, goes into a balance, and so does a
small share of the time of all other steps. There are drafts only while the balance is positive. So drafts that do not
pay lose this share of the time, whatever the reason, and before that what they gained lately, and a step more.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.scheduling.speculation import MOST_PROPOSALS, DraftCost

_SHARE = 1 / 160  # share of the time without drafts, which these may lose
_ADVANCE = 1 / 4  # the same of the first steps, so that drafts do not depend on the luck of the first
_FULL_DRAFTS = 2  # the balance is at most the cost of so many that fall: more would let drafts lose for long
_LEARNT = 1 / 30  # share of the older steps with proposals that is forgotten with each new one
_FORGOTTEN = 1 / 100  # and with each step without any
_WAIT_LEARNT = 1 / 10
_WAIT_FORGOTTEN = 1 / 300  # the wait changes less than the cost of proposals
_PRIOR_ROWS = 8.0
_PLAIN_STEPS = 8  # steps without proposals that are measured before the first with some
_REMEASURED_AFTER = 64  # steps with proposals
_REMEASURED = 2  # steps without proposals that follow them; the first of these is not planned ahead
_WAIT_S = DraftCost().wait_s  # before it is measured, and at least
AT_MOST = 8.0  # a step counts for at most this multiple of the expected, because delays are exceptions


@dataclass(slots=True)
class DraftBudget:
    """Costs are sums that decay. All times are seconds."""

    balance_s: float = 0.0
    n_plain: int = _PLAIN_STEPS  # steps without proposals that have to come first
    _n_steps: int = 0  # with proposals
    _draft_s: float = 0.0  # added by proposals
    _draft_rows: float = 0.0  # and their number
    _wait_s: float = _WAIT_S  # the ranks wait so long for a plan that waits for a result

    def plain(self, seconds: float, prior_s: float) -> None:
        """A step without proposals took `seconds`.

        Costs fade, so that those which prevent proposals are measured again in time.
        """
        self._fade(_FORGOTTEN)
        self._wait_s += _WAIT_FORGOTTEN * (_WAIT_S - self._wait_s)
        first = self.n_plain > 0 and not self._n_steps  # not a second measurement
        self.n_plain = max(0, self.n_plain - 1)
        self._add((_ADVANCE if first else _SHARE) * seconds, prior_s)

    def waited(self, wait_s: float, seconds: float, plain_s: float, prior_s: float) -> None:
        """A step took `seconds` after a wait for its plan; without drafts its tokens would have taken `plain_s`.

        `wait_s` 0: it had proposals, and no wait.
        """
        if wait_s:
            self._wait_s += _WAIT_LEARNT * (min(wait_s, AT_MOST * max(self._wait_s, _WAIT_S)) - self._wait_s)
        self._add(plain_s - min(wait_s + seconds, AT_MOST * plain_s), prior_s)

    def learn(self, n_proposals: int, added_s: float, prior_s: float) -> None:
        """A step took `added_s` longer than one without its proposals."""
        at_most_s = AT_MOST * n_proposals * self._proposal_s(prior_s)
        self._fade(_LEARNT)
        self._draft_s += min(max(0.0, added_s), at_most_s)
        self._draft_rows += n_proposals
        self._n_steps += 1
        if self._n_steps % _REMEASURED_AFTER == 0:
            self.n_plain = _REMEASURED

    def cost(self, plain_s: float, prior_s: float) -> DraftCost:
        """Cost of drafts in a step that takes `plain_s` without any; unknown while there may be none.

        `prior_s`: seconds of a proposal where little was learnt.
        """
        if self.n_plain or self.balance_s <= 0:
            return DraftCost()
        return DraftCost(plain_s, self._proposal_s(prior_s), max(self._wait_s, _WAIT_S))

    def _add(self, gain_s: float, prior_s: float) -> None:
        full_s = MOST_PROPOSALS * self._proposal_s(prior_s) + self._wait_s
        self.balance_s = min(self.balance_s + gain_s, _FULL_DRAFTS * full_s)

    def _fade(self, share: float) -> None:
        self._draft_s *= 1 - share
        self._draft_rows *= 1 - share

    def _proposal_s(self, prior_s: float) -> float:
        return (self._draft_s + _PRIOR_ROWS * prior_s) / (self._draft_rows + _PRIOR_ROWS)
