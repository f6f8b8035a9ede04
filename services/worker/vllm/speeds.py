"""Measures vLLM's speeds from its steps; routers use these numbers to place requests."""

from __future__ import annotations

_WEIGHT = 0.1  # weight of the newest step in the moving averages
_AT_MOST = 8.0  # a step counts for at most this multiple of the average, because delays are exceptions
_MIN_PREFILL_ROWS = 16  # fewer rows do not measure the prefill speed


class StepSpeeds:
    """Averages over recent steps: of steps that end prompts, and of steps that only decode."""

    def __init__(self) -> None:
        self.decode_step_ms = 0.0
        self._rows = 0.0  # average number of prompt tokens that end in a step
        self._seconds = 0.0  # average time from the admission of these prompts to their first tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed; 0 before the first measurement."""
        return self._rows / self._seconds if self._seconds else 0.0

    def prefilled(self, rows: int, seconds: float) -> None:
        """Prompts of `rows` computed tokens have their first tokens `seconds` after the admission of the first one."""
        if rows < _MIN_PREFILL_ROWS:
            return
        expected = rows / self.prefill_tokens_per_s if self._seconds else seconds
        self._rows = _blend(self._rows, rows)
        self._seconds = _blend(self._seconds, max(min(seconds, _AT_MOST * expected), 1e-6))

    def decoded(self, seconds: float) -> None:
        """A step without prompts took `seconds`."""
        ms = seconds * 1e3
        self.decode_step_ms = _blend(self.decode_step_ms, min(ms, _AT_MOST * self.decode_step_ms or ms))


def _blend(average: float, value: float) -> float:
    return value if average == 0 else average + _WEIGHT * (value - average)
