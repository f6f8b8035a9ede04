"""How fast this worker is, measured on its own steps; routers place requests by these numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from services.worker.scheduling.plan import StepPlan

_WEIGHT = 0.1  # of the newest step in the averages
_LATEST = 15  # steps of a kind whose median is the usual one: an average would show every pause of the machine
_MIN_PREFILL_ROWS = 32  # a step with fewer says little about prefill speed
_MIN_STEP_S = 0.008  # shorter steps are planned ahead at once: timers are not that exact
_STRETCH = 2  # decode steps by which prompts may lengthen a step, so that no pause comes near five times the usual
_MARGIN_S = 0.003  # a plan is ready at least this long before the ranks need it


@dataclass(frozen=True, slots=True)
class StepCost:
    """One finished step."""

    seconds: float
    n_rows: int
    n_prefill_rows: int


class _Usual:
    """The median of the latest values; 0 before there are any."""

    def __init__(self) -> None:
        self.value = 0.0
        self._latest: deque[float] = deque(maxlen=_LATEST)

    def add(self, value: float) -> None:
        """A new value."""
        self._latest.append(value)
        self.value = sorted(self._latest)[len(self._latest) // 2]


class Meter:
    """Times the steps of one pipeline. A step lasts from its start on the ranks to its result."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0
        self._decode_s: defaultdict[int, _Usual] = defaultdict(_Usual)  # by the power of two that the batch reaches
        self._prompt_row_s = _Usual()  # by which a prompt's token lengthens a step
        self._n_decodes = 0  # in the newest result
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
        self._n_decodes = n_rows - n_prefill_rows
        if n_prefill_rows >= _MIN_PREFILL_ROWS:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, n_rows / max(seconds, 1e-6))
            added_s = max(seconds - self._usual_decode_s(self._n_decodes), 0.1 * seconds)
            self._prompt_row_s.add(added_s / n_prefill_rows)
        elif n_prefill_rows == 0:
            self.decode_step_ms = _blend(self.decode_step_ms, seconds * 1e3)
            self._decode_s[_size(n_rows)].add(seconds)
        return StepCost(seconds, n_rows, n_prefill_rows)

    def _usual_decode_s(self, n_requests: int) -> float:
        """What most steps of about that many requests take, or of fewer, while such were not seen; 0: none were."""
        if not n_requests or not self._decode_s:
            return 0.0
        size = _size(n_requests)
        known = max((known for known in self._decode_s if known <= size), default=min(self._decode_s))
        return self._decode_s[known].value

    def spare_s(self, now: float) -> float:
        """How long the plan after the executing step can wait so that it arrives in time; 0: not at all."""
        submitted, n_rows, n_prefill_rows = self._submitted[0]
        expected = self._usual_decode_s(n_rows - n_prefill_rows) + n_prefill_rows * self._prompt_row_s.value
        if expected < _MIN_STEP_S:
            return 0.0
        margin = max(_MARGIN_S, 0.2 * expected)
        return max(0.0, max(submitted, self._last_result) + expected - margin - now)

    def share_min_tokens(self, block_tokens: int) -> int:
        """How many prefill tokens cost as much as the extra step that waiting for a leader takes."""
        tokens = int(self.decode_step_ms / 1e3 * self.prefill_tokens_per_s)
        return min(max(tokens, block_tokens), 512)

    def prefill_rows(self, most_s: float) -> int | None:
        """How many prompt tokens may share a step with decodes; None while that is not known.

        They lengthen it by at most `most_s`, and by at most two usual decode steps: streams keep a steady pace.
        """
        if not self._prompt_row_s.value:
            return None
        decode_s = self._usual_decode_s(max(self._n_decodes, 1))
        extra_s = min(most_s, _STRETCH * decode_s) if decode_s else most_s
        return max(_MIN_PREFILL_ROWS, int(extra_s / self._prompt_row_s.value))

    def forget_in_flight(self) -> None:
        """The ranks were lost; what they were computing never returns."""
        self._submitted.clear()


def _blend(average: float, value: float) -> float:
    return value if average == 0 else average + _WEIGHT * (value - average)


def _size(n_requests: int) -> int:
    return max(n_requests - 1, 0).bit_length()
