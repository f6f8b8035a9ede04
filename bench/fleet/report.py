"""The results of a run of a fleet, as a table in Markdown and as readings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from bench.fleet.faults import FleetFault
from bench.fleet.installation import FleetSize
from bench.fleet.load import FleetAnswer, Load
from bench.fleet.oracle import best_hit_rate, best_imbalance, imbalance
from bench.fleet.usage import ComponentUse, quantile
from bench.fleet.workloads import Workload
from bench.reading import Reading, lower
from bench.stats import percentile
from bench.suite.machine import machine

_KEEPS_UP_S = 0.05  # a generator that is later than this at p99 did not keep up


@dataclass(frozen=True, slots=True)
class Convergence:
    """Seconds until every router gave work to joined workers, and until it gave none to killed ones."""

    workers: int
    join_s: float
    loss_s: float


@dataclass(frozen=True, slots=True)
class FleetRun:
    """All that was measured."""

    size: FleetSize
    load: Load
    workload: Workload
    answers: Sequence[FleetAnswer]
    before: Mapping[str, ComponentUse]
    after: Mapping[str, ComponentUse]
    decided_before: Mapping[float, float]
    decided: Mapping[float, float]
    computed_tokens: Sequence[int]  # by worker
    held: Sequence[str]  # what was held after the last answer
    faults: Sequence[FleetFault]
    resumes: int  # attempts that were interrupted, and went on elsewhere
    convergence: Convergence | None

    def untrue(self, tokenizer: Tokenizer) -> bool:
        """Whether an answer was lost or altered, or something leaked."""
        return bool(self.held) or any(each.lost() or each.altered(tokenizer) for each in self.answers)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in a cache."""
        tokens = sum(len(each.request.prompt_ids) for each in self.answers)
        return sum(each.cached_tokens for each in self.answers) / tokens if tokens else 0.0

    @property
    def late_s(self) -> float:
        """How late the generator sent a request, at p99."""
        return percentile([each.late_s for each in self.answers], 99)


def table(run: FleetRun, tokenizer: Tokenizer) -> str:
    """The results in Markdown."""
    where, size, answers = machine(), run.size, run.answers
    requests = [each.request for each in answers]
    lost = [each for each in answers if each.lost()]
    altered = [each for each in answers if each.altered(tokenizer)]
    firsts = [each.first_token_s for each in answers if not each.lost()]
    pace = [
        (each.seconds - each.first_token_s) / (each.request.max_tokens - 1)
        for each in answers
        if not each.lost() and each.request.max_tokens > 1
    ]
    decisions = [quantile(run.decided_before, run.decided, share) * 1e3 for share in (0.5, 0.99, 0.999)]
    block = run.workload.language.block_tokens
    rows = [
        ("requests", f"{len(answers)} in {run.load.seconds:g} s ({run.load.rate:g}/s, {run.workload.name})"),
        ("lost, altered, leaked", f"{len(lost)}, {len(altered)}, {len(run.held)}"),
        (
            "generator late, p99",
            f"{run.late_s * 1e3:.1f} ms{'' if run.late_s < _KEEPS_UP_S else ': it did not keep up'}",
        ),
        ("first token p50, p99", f"{percentile(firsts, 50):.3f} s, {percentile(firsts, 99):.3f} s"),
        ("pace p50, p99", f"{percentile(pace, 50) * 1e3:.1f} ms, {percentile(pace, 99) * 1e3:.1f} ms a token"),
        ("decision p50, p99, p99.9", ", ".join(f"{each:.2f}" for each in decisions) + " ms"),
        ("prefix hits, of an oracle", f"{run.hit_rate:.1%}, {best_hit_rate(requests, block):.1%}"),
    ]
    if not run.faults:  # a worker that was started again has computed nothing
        even = f"{imbalance(run.computed_tokens):.2f}, {best_imbalance(requests, size.workers):.2f}"
        rows.append(("busiest worker over mean, of an oracle", even))
    if run.convergence is not None:
        came = run.convergence
        rows.append((f"{came.workers} workers join, are lost", f"{came.join_s:.2f} s, {came.loss_s:.2f} s"))
    if run.faults:
        rows.append(("faults", "; ".join(f"{n} x {fault}" for fault, n in Counter(run.faults).items())))
        rows.append(("attempts that went on elsewhere", str(run.resumes)))
    lines = [
        f"{size.workers} workers, {size.routers} routers, {size.gateways} gateways on {where['processor']}, "
        f"{where['cores']} cores",
        "",
        "| measured | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        *_components(run),
        *(f"\nlost: {each.error or 'no end'}" for each in lost[:5]),
        *(f"\naltered: {each.text!r}" for each in altered[:5]),
        *(f"\nleaked: {each}" for each in run.held[:5]),
    ]
    return "\n".join(lines)


def _components(run: FleetRun) -> list[str]:
    """The table of components. The use of a process that was killed meanwhile is lost: faults give no CPU times."""
    lines = [
        "| component | processes | CPU a request | wake-ups a second | memory | descriptors |",
        "|---|---|---|---|---|---|",
    ]
    for name, after in run.after.items():
        before = run.before[name]
        cpu = "" if run.faults else f"{(after.cpu_s - before.cpu_s) / max(1, len(run.answers)) * 1e3:.2f} ms"
        wakeups = "" if run.faults else f"{(after.wakeups - before.wakeups) / run.load.seconds:.0f}"
        memory = f"{after.rss_mib:.0f} MiB"
        if name == "workers":
            memory += f", {after.rss_mib / run.size.workers:.2f} a worker"
        lines.append(f"| {name} | {after.processes} | {cpu} | {wakeups} | {memory} | {after.descriptors} |")
    return lines


def readings(run: FleetRun) -> list[Reading]:
    """The results as readings."""
    name = f"fleet/{run.size.workers} workers, {run.load.rate:g}/s, {run.workload.name}"
    firsts = [each.first_token_s for each in run.answers if not each.lost()]
    found = [lower(f"{name}/first token p99", percentile(firsts, 99), "s")]
    found += [
        lower(
            f"{name}/{component} CPU a request",
            (after.cpu_s - run.before[component].cpu_s) * 1e3 / len(run.answers),
            "ms",
        )
        for component, after in run.after.items()
        if not run.faults and run.answers
    ]
    return found
