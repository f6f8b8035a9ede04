"""How fast this worker is, measured on its own steps; routers place requests by these numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.common.fitted_line import FittedLine
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.step_builder import StepLoad

_WEIGHT = 0.1  # of the newest step in the averages
_UP, _DOWN = 0.05, 0.2  # of the newest step in what is usual: what held a step up is not
_AT_MOST = 8.0  # times the average that a step counts for: one that was held up says little about the next ones
_MIN_PREFILL_ROWS = 16  # a step with fewer says little about prefill speed
_MIN_STEP_S = 0.016  # shorter steps are planned ahead at once: timers are not that exact
# By how many decode steps prompts may lengthen one: pauses stay below five times the usual, also while the machine is
# slow for a moment. Short steps by more: what a step costs by itself would be paid for each of many small pieces.
_SHORT_STRETCH, _STRETCH = 2.0, 1.5
_BEYOND_S = 0.008  # by which long steps may be lengthened besides
_PROMPT_STEPS = 30.0  # over about so many what prompts add to a step is learnt, ...
_ENOUGH_STEPS, _ENOUGH_SPREAD = 10.0, 0.25  # ... its fixed part once there are some that differ by so much of the mean
_LEAST_SLOPE = 1 / 64  # of what a row costs with the fixed part in it: below that a slope is noise
_FEW_KEYS = 256  # for each row, on average: such prompts tell what a row costs, others what a key adds
_MARGIN_S = 0.003  # a plan is ready at least this long before the ranks need it


@dataclass(frozen=True, slots=True)
class StepCost:
    """One finished step."""

    seconds: float
    n_rows: int
    n_prefill_rows: int


class StepTimer:
    """Times the steps of one pipeline. A step lasts from its start on the ranks to its result."""

    def __init__(self) -> None:
        self.decode_step_ms = 0.0
        self.computed_tokens = 0  # of prompts and of answers
        self._prefill_rows = 0.0  # of a step with some, on average, ...
        self._prefill_s = 0.0  # ... and how long such a step takes
        self._decode_s: dict[int, float] = {}  # what is usual, by how many bits the number of decodes has
        self._prompts = FittedLine(_PROMPT_STEPS)  # seconds that prompts added to a step, without their keys, by rows
        self._key_s = 0.0  # of a key of such a row

    @property
    def prefill_tokens_per_s(self) -> float:
        """In steps with prompts; 0 before the first one.

        Rows by time, not the mean of the steps' rates: these differ threefold by how many rows a step has, and routers
        would take equal workers for unlike ones.
        """
        return self._prefill_rows / self._prefill_s if self._prefill_s else 0.0

    def returned(self, step: StepLoad, seconds: float) -> StepCost:
        """A step has taken so long."""
        self.computed_tokens += step.n_rows
        n_decodes = step.n_rows - step.n_prefill_rows
        if step.n_prefill_rows >= _MIN_PREFILL_ROWS:
            expected_s = step.n_rows / self.prefill_tokens_per_s if self._prefill_s else seconds
            self._prefill_rows = _blend(self._prefill_rows, step.n_rows)
            self._prefill_s = _blend(self._prefill_s, max(min(seconds, _AT_MOST * expected_s), 1e-6))
            decodes_s = min(self._step_s(n_decodes), seconds / 2) if n_decodes else 0.0
            self._learn_prompt(step, seconds - decodes_s)
        elif step.n_prefill_rows == 0:
            at_most_ms = _AT_MOST * self.decode_step_ms or seconds * 1e3
            self.decode_step_ms = _blend(self.decode_step_ms, min(seconds * 1e3, at_most_ms))
            bits = n_decodes.bit_length()
            self._decode_s[bits] = _usual(self._decode_s.get(bits, seconds), seconds)
        return StepCost(seconds, step.n_rows, step.n_prefill_rows)

    def _learn_prompt(self, step: StepLoad, seconds: float) -> None:
        """From the part of a step that was prompts'."""
        fixed_s, row_s = self._prompt_s()
        expected_s = fixed_s + row_s * step.n_prefill_rows
        if row_s and step.n_keys > _FEW_KEYS * step.n_prefill_rows and seconds > expected_s:
            self._key_s = _blend(self._key_s, (seconds - expected_s) / step.n_keys)
        else:
            without_keys = max(seconds - self._key_s * step.n_keys, seconds / 4)
            at_most_s = _AT_MOST * expected_s or without_keys
            self._prompts.learn(step.n_prefill_rows, min(without_keys, at_most_s))

    def _prompt_s(self) -> tuple[float, float]:
        """What prompts add to a step whatever it holds, and what each of their rows adds, without its keys; 0: unknown.

        Where kernels have to be launched one by one, or no graph is captured for such a step, the first is most of it.
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
        """How long after the start of such a step the plan after it must be ready; 0: at once."""
        expected = self._step_s(step.n_rows - step.n_prefill_rows)
        if self.prefill_tokens_per_s:
            expected += step.n_prefill_rows / self.prefill_tokens_per_s
        if expected < _MIN_STEP_S:
            return 0.0
        margin = max(_MARGIN_S, 0.2 * expected)
        return max(0.0, expected - margin)

    def share_min_tokens(self, block_tokens: int) -> int:
        """How many prefill tokens cost as much as the extra step that waiting for a producer takes."""
        tokens = int(self.decode_step_ms / 1e3 * self.prefill_tokens_per_s)
        return min(max(tokens, block_tokens), 512)

    def prefill_budget(self, most_s: float, n_decodes: int) -> PrefillBudget | None:
        """What prompts may add to a step with as many decodes; None while that is not known.

        They lengthen it by at most `most_s`, and by at most two decode steps: streams keep a steady pace. Where a step
        with prompts costs more than that whatever it holds, their rows may cost as much again: smaller pieces would be
        more such steps.
        """
        fixed_s, row_s = self._prompt_s()
        if not row_s:
            return None
        step_s = self._step_s(n_decodes)
        extra_s = min(most_s, _SHORT_STRETCH * step_s, _STRETCH * step_s + _BEYOND_S) if self._decode_s else most_s
        rows_s = max(extra_s - fixed_s, fixed_s)
        return PrefillBudget(max(_MIN_PREFILL_ROWS, int(rows_s / row_s)), self._key_s / row_s)

    def _step_s(self, n_decodes: int) -> float:
        """How long a step of about as many decodes takes.

        No longer than one of more decodes: where all streams but one are seldom alone in a step, those few were held up
        by what ended the last one. Of more than were seen, as while a crowd comes in and every step has prompts in it,
        it takes longer by what as many rows of a prompt cost, in part: arithmetic goes on while weights are read.
        """
        if not self._decode_s:
            return 0.0
        if enough := [seconds for bits, seconds in self._decode_s.items() if bits >= n_decodes.bit_length()]:
            return min(enough)
        return math.hypot(self._decode_s[max(self._decode_s)], n_decodes * self._prompt_s()[1])


def _usual(usual: float, value: float) -> float:
    """Near the lower end of the values: streams notice by how much a pause exceeds the others."""
    return usual + (_DOWN * (value - usual) if value < usual else _UP * (min(value, 2 * usual) - usual))


def _blend(average: float, value: float) -> float:
    return value if average == 0 else average + _WEIGHT * (value - average)
