"""How fast this worker is, measured on its own steps; routers place requests by these numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.worker.scheduling.plan import StepPlan

_WEIGHT = 0.1  # of the newest step in the averages
_MIN_PREFILL_ROWS = 16  # a step with fewer says little about prefill speed
_MIN_STEP_S = 0.016  # shorter steps are planned ahead at once: timers are not that exact
_STRETCH = 3  # decode steps by which prompts may lengthen a step: no pause beyond four times the usual
_MARGIN_S = 0.003  # a plan is ready at least this long before the ranks need it


@dataclass(frozen=True, slots=True)
class StepCost:
    """One finished step."""

    seconds: float
    n_rows: int
    n_prefill_rows: int


class Meter:
    """Times the steps of one pipeline. A step lasts from its start on the ranks to its result."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0
        self._decode_s: dict[int, float] = {}  # by how many bits the number of decodes has
        self._submitted: deque[tuple[float, int, int]] = deque()
        self._last_result = 0.0

    def planned(self, plan: StepPlan, now: float) -> None:
        """A plan went to the ranks."""
        rows = [chunk.n_tokens for chunk in plan.chunks]
        self._submitted.append((now, sum(rows), sum(n for n in rows if n > 1)))

    def returned(self, now: float) -> StepCost:
        """The result of the oldest plan is here."""
        submitted, n_rows, n_prefill_rows = self._submitted.popleft()
        seconds = now - max(submitted, self._last_result)
        self._last_result = now
        if n_prefill_rows >= _MIN_PREFILL_ROWS:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, n_rows / max(seconds, 1e-6))
        elif n_prefill_rows == 0:
            self.decode_step_ms = _blend(self.decode_step_ms, seconds * 1e3)
            bits = n_rows.bit_length()
            self._decode_s[bits] = _blend(self._decode_s.get(bits, 0.0), seconds)
        return StepCost(seconds, n_rows, n_prefill_rows)

    def spare_s(self, now: float) -> float:
        """How long the plan after the executing step can wait so that it arrives in time; 0: not at all."""
        submitted, n_rows, n_prefill_rows = self._submitted[0]
        expected = self._step_s(n_rows - n_prefill_rows)
        if self.prefill_tokens_per_s:
            expected += n_prefill_rows / self.prefill_tokens_per_s
        if expected < _MIN_STEP_S:
            return 0.0
        margin = max(_MARGIN_S, 0.2 * expected)
        return max(0.0, max(submitted, self._last_result) + expected - margin - now)

    def share_min_tokens(self, block_tokens: int) -> int:
        """How many prefill tokens cost as much as the extra step that waiting for a leader takes."""
        tokens = int(self.decode_step_ms / 1e3 * self.prefill_tokens_per_s)
        return min(max(tokens, block_tokens), 512)

    def prefill_rows(self, most_s: float, n_decodes: int) -> int | None:
        """How many prompt tokens may share a step with as many decodes; None while that is not known.

        They lengthen it by at most `most_s`, and by at most three decode steps: streams keep a steady pace.
        """
        if not self.prefill_tokens_per_s:
            return None
        extra_s = min(most_s, _STRETCH * self._step_s(n_decodes)) if self.decode_step_ms else most_s
        return max(_MIN_PREFILL_ROWS, int(self.prefill_tokens_per_s * extra_s))

    def _step_s(self, n_decodes: int) -> float:
        """How long a step of about as many decodes takes; where none was seen, one of more, or else the latest."""
        seen = [bits for bits in self._decode_s if bits >= n_decodes.bit_length()]
        return self._decode_s[min(seen)] if seen else self.decode_step_ms / 1e3

    def forget_in_flight(self) -> None:
        """The ranks were lost; what they were computing never returns."""
        self._submitted.clear()


def _blend(average: float, value: float) -> float:
    return value if average == 0 else average + _WEIGHT * (value - average)
