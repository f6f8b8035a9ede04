"""Measures the worker's speed on its own steps; routers use these numbers to place requests."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from services.common.fitted_line import FittedLine
from services.worker.native.draft_budget import AT_MOST, DraftBudget
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.speculation import DraftCost
from services.worker.scheduling.step_builder import StepLoad

_WEIGHT = 0.1  # weight of the newest step in the moving averages
_UP, _DOWN = 0.05, 0.2  # weights of the EWMA of decode times: slow up, because delays are exceptions, fast down
# The same of the times that drafts are judged by: while there are drafts, only few steps correct one that is too long.
_PLAIN_DOWN = 0.5
_MIN_PREFILL_ROWS = 16  # a step with fewer prefill rows does not measure the prefill speed
_MIN_STEP_S = 0.016  # the plan after a shorter step is sent at once, because timers are not exact enough
# Number of decode steps by which prompts may lengthen a step: pauses stay below five times the usual, also while the
# machine is slow for a moment. Short steps may grow more: many small pieces would pay a step's fixed cost many times.
_SHORT_STRETCH, _STRETCH = 2.0, 1.5
_BEYOND_S = 0.008  # seconds by which long steps may be lengthened in addition
# Seconds by which prompts may lengthen any step, by device. A GPU's steps are so short that several of them are no
# pause to a reader, and one with prompts costs 10 ms whatever it holds: paced by two steps, 64 prompts waited 7.5 s.
LEAST_PROMPT_S = {"cpu": 0.0, "cuda": 0.05}
_PROMPT_STEPS = 30.0  # number of recent steps from which the cost of prompts is learnt
_ENOUGH_STEPS, _ENOUGH_SPREAD = 10.0, 0.25  # steps, and their relative spread, needed to learn the fixed part
_LEAST_SLOPE = 1 / 64  # smaller slopes, relative to the mean cost of a row, are noise
_FEW_KEYS = 256  # keys per row on average: prompts up to it measure the cost of a row, others that of a key
_MARGIN_S = 0.003  # a plan is ready at least this long before the ranks need it


@dataclass(frozen=True, slots=True)
class StepCost:
    """One finished step."""

    seconds: float
    n_rows: int
    n_prefill_rows: int


class StepTimer:
    """Times the steps of one pipeline. A step lasts from its start on the ranks to its result."""

    def __init__(self, least_prompt_s: float = 0.0, *, drafts: bool = True) -> None:
        """`least_prompt_s`: by how much prompts may lengthen every step, however short. `drafts`: judge them."""
        self._least_prompt_s, self._judges = least_prompt_s, drafts
        self.decode_step_ms = 0.0  # milliseconds from one token of a request to the next
        self.computed_tokens = 0  # prompt and answer tokens
        self._prefill_rows = 0.0  # average number of prefill rows of steps with prompts
        self._prefill_s = 0.0  # average seconds of these steps
        self._decode_s: dict[int, float] = {}  # usual seconds of a decode step, by the bit length of its decodes
        self._plain_s: dict[int, float] = {}  # the same by the number of its decodes, which judges drafts
        # By the bit length of the decodes: with more, a proposal costs more.
        self._drafts: defaultdict[int, DraftBudget] = defaultdict(DraftBudget)
        self._prompts = FittedLine(_PROMPT_STEPS)  # seconds that prompts add to a step, without their keys, by rows
        self._key_s = 0.0  # seconds that a key of a prefill row adds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed in steps with prompts; 0 before the first such step.

        It divides average rows by average seconds. The mean of the steps' rates would depend on the steps' sizes, by a
        factor of three, and make equal workers look different to routers.
        """
        return self._prefill_rows / self._prefill_s if self._prefill_s else 0.0

    def returned(self, step: StepLoad, seconds: float, n_accepted: int = 0, wait_s: float = 0.0) -> StepCost:
        """Learn from a step that took `seconds`, and of whose proposals `n_accepted` stood.

        `wait_s`: before that the ranks waited so long for its plan, which waited for a result; 0: it did not.
        """
        if not step.n_rows:
            return StepCost(seconds, 0, 0)  # admissions alone
        self.computed_tokens += step.n_rows - step.n_encoded - step.n_proposals + n_accepted
        n_decodes = step.n_rows - step.n_prefill_rows - step.n_proposals
        if step.n_prefill_rows >= _MIN_PREFILL_ROWS:
            expected_s = step.n_rows / self.prefill_tokens_per_s if self._prefill_s else seconds
            self._prefill_rows = _blend(self._prefill_rows, step.n_rows)
            self._prefill_s = _blend(self._prefill_s, max(min(seconds, AT_MOST * expected_s), 1e-6))
            decodes_s = min(self._step_s(n_decodes), seconds / 2) if n_decodes else 0.0
            self._learn_prompt(step, seconds - decodes_s)
        elif step.n_prefill_rows == 0:
            token_ms = (wait_s + seconds) * 1e3 * n_decodes / (n_decodes + n_accepted)
            at_most_ms = AT_MOST * self.decode_step_ms or token_ms
            self.decode_step_ms = _blend(self.decode_step_ms, min(token_ms, at_most_ms))
            if self._judges:
                self._judge(step, n_decodes, seconds, n_accepted, wait_s)
            if step.n_proposals:
                return StepCost(seconds, step.n_rows, 0)
            size = n_decodes.bit_length()
            self._decode_s[size] = _usual(self._decode_s.get(size, seconds), seconds)
            self._plain_s[n_decodes] = _usual(self._plain_s.get(n_decodes, seconds), seconds, _PLAIN_DOWN)
        return StepCost(seconds, step.n_rows, step.n_prefill_rows)

    def _judge(self, step: StepLoad, n_decodes: int, seconds: float, n_accepted: int, wait_s: float) -> None:
        """Learn the cost of drafts, and what they gained or lost, from a step of decodes."""
        drafts, undrafted_s = self._drafts[n_decodes.bit_length()], self._undrafted_s(n_decodes)
        prior_s = self._proposal_prior_s(n_decodes)
        if undrafted_s and (wait_s or step.n_proposals):
            drafts.waited(wait_s, seconds, undrafted_s * (n_decodes + n_accepted) / n_decodes, prior_s)
        if step.n_proposals:
            drafts.learn(step.n_proposals, seconds - undrafted_s, prior_s)
        else:
            drafts.plain(seconds, prior_s)

    def draft_cost(self, n_decodes: int) -> DraftCost:
        """Cost of proposals in a step with `n_decodes` decodes; unknown while steps without any are measured.

        Gains are judged by the time of a step without proposals: a wrong one makes losses look like gains.
        """
        if not self._judges or n_decodes not in self._plain_s:
            return DraftCost()
        prior_s = self._proposal_prior_s(n_decodes)
        return self._drafts[n_decodes.bit_length()].cost(self._undrafted_s(n_decodes), prior_s)

    def _undrafted_s(self, n_decodes: int) -> float:
        """Seconds of a step of decodes alone, or of one or two more: the first of a number may have been delayed."""
        seen = [self._plain_s[n] for n in range(n_decodes, n_decodes + 3) if n in self._plain_s]
        return min(seen, default=self._step_s(n_decodes))

    def _proposal_prior_s(self, n_decodes: int) -> float:
        """Seconds that a proposal adds while there were none lately: as many as a row of a prompt.

        On CPUs a draft is computed as a piece of a prompt is; elsewhere its rows cost somewhat more, which is learnt.
        """
        return self._prompt_s()[1] or self._step_s(n_decodes) / 8

    def _learn_prompt(self, step: StepLoad, seconds: float) -> None:
        """Learn the cost of prompts from `seconds`, the part of a step's time that its prompts added."""
        fixed_s, row_s = self._prompt_s()
        expected_s = fixed_s + row_s * step.n_prefill_rows
        if row_s and step.n_keys > _FEW_KEYS * step.n_prefill_rows and seconds > expected_s:
            self._key_s = _blend(self._key_s, (seconds - expected_s) / step.n_keys)
        else:
            without_keys = max(seconds - self._key_s * step.n_keys, seconds / 4)
            at_most_s = AT_MOST * expected_s or without_keys
            self._prompts.learn(step.n_prefill_rows, min(without_keys, at_most_s))

    def _prompt_s(self) -> tuple[float, float]:
        """Seconds that prompts add to a step: a fixed part, and a part per row without its keys; 0: unknown.

        The fixed part dominates where kernels are launched one by one or no graph is captured for such steps.
        """
        steps = self._prompts
        if not steps.weight:
            return 0.0, 0.0
        row_s = steps.mean_y / steps.mean_x
        if steps.weight < _ENOUGH_STEPS or steps.variance < (_ENOUGH_SPREAD * steps.mean_x) ** 2:
            return 0.0, row_s
        slope = min(max(steps.slope, _LEAST_SLOPE * row_s), row_s)
        return steps.mean_y - slope * steps.mean_x, slope

    def spare_s(self, step: StepLoad) -> float:
        """Seconds from the start of such a step until the next plan must be ready; 0: at once."""
        expected = self._step_s(step.n_rows - step.n_prefill_rows)
        if self.prefill_tokens_per_s:
            expected += step.n_prefill_rows / self.prefill_tokens_per_s
        if expected < _MIN_STEP_S:
            return 0.0
        margin = max(_MARGIN_S, 0.2 * expected)
        return max(0.0, expected - margin)

    def share_min_tokens(self, block_tokens: int) -> int:
        """Number of prefill tokens that cost as much as the step that waiting for a producer adds."""
        tokens = int(self.decode_step_ms / 1e3 * self.prefill_tokens_per_s)
        return min(max(tokens, block_tokens), 512)

    def prefill_budget(self, most_s: float, n_decodes: int) -> PrefillBudget | None:
        """Budget of prompts in a step with `n_decodes` decodes; None while their cost is unknown.

        Prompts lengthen a step by at most `most_s` and by at most two decode steps, to keep a steady pace of the
        streams, or by `least_prompt_s`. If the fixed cost of prompts alone exceeds that, their rows may cost as much
        again, because smaller pieces would pay the fixed cost in more steps.
        """
        fixed_s, row_s = self._prompt_s()
        if not row_s:
            return None
        step_s = self._step_s(n_decodes)
        paced_s = min(_SHORT_STRETCH * step_s, _STRETCH * step_s + _BEYOND_S) if self._decode_s else most_s
        extra_s = min(most_s, max(paced_s, self._least_prompt_s))
        rows_s = max(extra_s - fixed_s, fixed_s)
        return PrefillBudget(max(_MIN_PREFILL_ROWS, int(rows_s / row_s)), self._key_s / row_s)

    def _step_s(self, n_decodes: int) -> float:
        """Expected seconds of a step with about `n_decodes` decodes.

        The estimate does not exceed that of more decodes: the few steps with fewer decodes may have been delayed by the
        end of another stream. For more decodes than were seen, as when many prompts arrive at once, it adds a part of
        the cost of as many prefill rows; only a part, because arithmetic overlaps with reading the weights.
        """
        if not self._decode_s:
            return 0.0
        if enough := [seconds for bits, seconds in self._decode_s.items() if bits >= n_decodes.bit_length()]:
            return min(enough)
        return math.hypot(self._decode_s[max(self._decode_s)], n_decodes * self._prompt_s()[1])


def _usual(usual: float, value: float, down: float = _DOWN) -> float:
    """The EWMA after `value`, near the lower end of the values: delays count little."""
    return usual + (down * (value - usual) if value < usual else _UP * (min(value, 2 * usual) - usual))


def _blend(average: float, value: float) -> float:
    return value if average == 0 else average + _WEIGHT * (value - average)
