"""The knee of an installation: the highest rate of requests that it holds, found by runs at rising rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from bench.fleet.report import FleetRun
from bench.stats import percentile

DECISION_S = 0.015  # decisions at p99, above which a rate does not hold
_SLOWER = 2.0  # first tokens at p50, as a multiple of those at the first rate, above which a rate does not hold
_MOST_RUNS = 12


@dataclass(frozen=True, slots=True)
class Knee:
    """Runs at rising rates, and one at half of the highest rate that held."""

    tried: Sequence[FleetRun]
    held: Sequence[bool]  # for each of these runs
    half: FleetRun | None  # None: not even the first rate held

    @property
    def rate(self) -> float:
        """The highest rate that held; 0: none did."""
        return max((run.load.rate for run, held in zip(self.tried, self.held, strict=True) if held), default=0.0)

    def table(self) -> str:
        """The runs in Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "| requests/s | decision p50, p99 | first token p50, p99 | generator late, p99 | holds |"
        yield "|---|---|---|---|---|"
        for run, held in zip(self.tried, self.held, strict=True):
            yield _row(run, "yes" if held else "no")
        if self.half is not None:
            yield _row(self.half, "half the knee")
        yield ""
        yield f"Knee: {self.rate:g} requests/s." if self.half else "Not even the first rate holds."


def find_knee(measure: Callable[[float], FleetRun], holds: Callable[[FleetRun, FleetRun], bool], first: float) -> Knee:
    """Double the rate from `first` until a run does not hold, try one rate between, and measure at half of the best.

    `holds(run, first_run)`.
    """
    tried = [measure(first)]
    held = [holds(tried[0], tried[0])]
    rate = first
    while held[-1] and len(tried) < _MOST_RUNS:
        rate *= 2
        tried.append(measure(rate))
        held.append(holds(tried[-1], tried[0]))
    if len(tried) > 1 and not held[-1]:
        tried.append(measure(rate * 0.75))
        held.append(holds(tried[-1], tried[0]))
    knee = Knee(tried, held, None)
    return Knee(tried, held, measure(knee.rate / 2)) if knee.rate else knee


def holds(run: FleetRun, first: FleetRun, tokenizer: Tokenizer) -> bool:
    """Whether nothing queues: answers are right, requests were sent in time, decisions and first tokens are quick."""
    decides = run.decision_s(0.99) <= DECISION_S
    answers = _first_token_s(run) <= _SLOWER * _first_token_s(first)
    return run.kept_up and decides and answers and not run.untrue(tokenizer)


def _first_token_s(run: FleetRun, percent: float = 50) -> float:
    return percentile([each.first_token_s for each in run.answers if not each.lost()], percent)


def _row(run: FleetRun, holds: str) -> str:
    decisions = f"{run.decision_s(0.5) * 1e3:.2f}, {run.decision_s(0.99) * 1e3:.2f} ms"
    firsts = f"{_first_token_s(run):.3f}, {_first_token_s(run, 99):.3f} s"
    return f"| {run.load.rate:g} | {decisions} | {firsts} | {run.late_s * 1e3:.1f} ms | {holds} |"
