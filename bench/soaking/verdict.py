"""The verdict of a soak run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.soaking.faults import FaultKind
from bench.soaking.load import Served
from bench.soaking.memory import Growth
from bench.soaking.texts import Answer, Difference, difference
from bench.stats import median, percentile


@dataclass(frozen=True)
class FaultRecord:
    """One fault; `recovered_s` is the time from fault to recovery, None if it took too long."""

    kind: FaultKind
    victim: str
    at: float  # monotonic
    recovered_s: float | None


@dataclass(frozen=True)
class FaultSummary:
    """All faults of one kind."""

    kind: FaultKind
    count: int
    unrecovered: int
    recover_s_median: float
    recover_s_max: float
    longest_pause_s: float  # longest pause of a client whose answer was in progress at the fault


@dataclass(frozen=True)
class Verdict:
    """The results of a run; latencies in milliseconds, of requests without an error."""

    seconds: float
    requests: int
    errors: int
    first_error: str
    differences: dict[str, int]
    ttft_ms_p50: float
    ttft_ms_p99: float
    total_ms_p50: float
    total_ms_p99: float
    longest_pause_ms_p50: float
    longest_pause_ms_p99: float
    faults: list[FaultSummary]
    memory: list[Growth]

    @property
    def passed(self) -> bool:
        """Whether there was at least one request, no error, no wrong answer, and recovery from all faults."""
        unrecovered = sum(fault.unrecovered for fault in self.faults)
        return self.requests > 0 and not (self.errors or self.differences or unrecovered)

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether the run passed."""
        return {"passed": self.passed, **asdict(self)}


def judge(
    seconds: float,
    served: Sequence[Served],
    references: Sequence[Answer],
    faults: Sequence[FaultRecord],
    memory: Sequence[Growth],
) -> Verdict:
    """Compare every answer with its reference, and summarise the run."""
    good = [one for one in served if not one.error]
    errors = [one.error for one in served if one.error]
    measured = Counter(difference(references[one.case], one.answer) for one in good)
    ttft, total = [one.ttft * 1e3 for one in good], [(one.ended - one.began) * 1e3 for one in good]
    pauses = [one.longest_pause * 1e3 for one in good]
    return Verdict(
        seconds=seconds,
        requests=len(served),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        differences={str(kind): count for kind, count in measured.items() if kind is not Difference.NONE},
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p99=percentile(ttft, 99),
        total_ms_p50=percentile(total, 50),
        total_ms_p99=percentile(total, 99),
        longest_pause_ms_p50=percentile(pauses, 50),
        longest_pause_ms_p99=percentile(pauses, 99),
        faults=[_summary(kind, faults, served) for kind in FaultKind if any(f.kind is kind for f in faults)],
        memory=list(memory),
    )


def _summary(kind: FaultKind, faults: Sequence[FaultRecord], served: Sequence[Served]) -> FaultSummary:
    ours = [fault for fault in faults if fault.kind is kind]
    times = [fault.recovered_s for fault in ours if fault.recovered_s is not None]
    met = [one for one in served if any(one.began <= fault.at <= one.ended for fault in ours)]
    return FaultSummary(
        kind=kind,
        count=len(ours),
        unrecovered=len(ours) - len(times),
        recover_s_median=median(times),
        recover_s_max=max(times, default=0.0),
        longest_pause_s=max((one.longest_pause for one in met), default=0.0),
    )


def show(verdict: Verdict, console: Console) -> None:
    """Print three tables, and PASSED or FAILED."""
    console.print(_requests_table(verdict), _faults_table(verdict), _memory_table(verdict))
    if verdict.first_error:
        console.print(f"First error: {verdict.first_error}", markup=False)
    console.print("[green]PASSED" if verdict.passed else "[red]FAILED")


def _requests_table(verdict: Verdict) -> Table:
    table = Table(title=f"{verdict.seconds:.0f} s", show_header=False)
    table.add_row("requests", f"{verdict.requests:,}")
    table.add_row("client-visible errors", str(verdict.errors))
    table.add_row("wrong answers", ", ".join(f"{n} {name}" for name, n in verdict.differences.items()) or "0")
    for label, name in (("time to first token", "ttft"), ("whole answer", "total"), ("longest pause", "longest_pause")):
        p50, p99 = getattr(verdict, f"{name}_ms_p50"), getattr(verdict, f"{name}_ms_p99")
        table.add_row(f"{label}, p50 / p99", f"{p50:,.0f} / {p99:,.0f} ms")
    return table


def _faults_table(verdict: Verdict) -> Table:
    table = Table(title="faults")
    for column in ("fault", "times", "not recovered", "whole again after, median / max", "longest pause of a client"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault in verdict.faults:
        recovery = f"{fault.recover_s_median:.1f} / {fault.recover_s_max:.1f} s"
        pause = f"{fault.longest_pause_s:.1f} s"
        table.add_row(fault.kind, str(fault.count), str(fault.unrecovered), recovery, pause)
    return table


def _memory_table(verdict: Verdict) -> Table:
    table = Table(title="memory: PSS; growth of private memory after warm-up, pooled over restarts")
    for column in ("process", "lives", "PSS at the end, MiB", "growth, MiB per hour", "observed"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for row in verdict.memory:
        rate = "-" if row.mib_per_hour is None else f"{row.mib_per_hour:+.1f}"
        table.add_row(row.kind, str(row.lives), f"{row.last_mib:.0f}", rate, f"{row.observed_s:.0f} s")
    return table
