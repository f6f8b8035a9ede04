"""The results of a run of a fleet, as a table in Markdown and as readings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from bench.fleet.faults import StruckFault
from bench.fleet.installation import FleetSize
from bench.fleet.load import FleetAnswer, Load, most_open
from bench.fleet.oracle import best_hit_rate, best_imbalance, imbalance
from bench.fleet.usage import ComponentUse, quantile
from bench.fleet.workloads import Arrivals
from bench.reading import Reading, lower
from bench.stats import percentile
from bench.suite.machine import machine

_FIT_FROM = 3  # runs of different sizes, from which a line shows larger ones
_FIT_TO = (1000, 2000)  # workers
_GROWS = ("CPU a second, idle", "messages/s, idle", "KiB/s, idle", "memory")  # costs that follow the number of workers
_COSTS = {
    "CPU a request": "{:.2f} ms",
    "CPU a second, idle": "{:.1f} ms",
    "wake-ups/s": "{:.0f}",
    "messages/s": "{:.1f}",
    "messages/s, idle": "{:.1f}",
    "KiB/s": "{:.1f}",
    "KiB/s, idle": "{:.2f}",
    "memory": "{:.0f} MiB",
    "descriptors": "{:.0f}",
}
_KEEPS_UP_S = 0.05  # a generator that is later than this at p99 did not keep up


@dataclass(frozen=True, slots=True)
class IndexUse:
    """Events that coordinators took in during a load."""

    events_per_s: float  # KV events
    lag_s: float  # the longest time that a worker was out of step


@dataclass(frozen=True, slots=True)
class Convergence:
    """Seconds until every router gave work to joined workers, and none to killed ones; and after the loss of a part."""

    workers: int
    join_s: float
    loss_s: float
    router_s: float  # until a router that was started again gave work to all workers
    coordinator_s: float  # until one that was started again knew all blocks of all workers
    redis_s: float  # until an empty one had the leases of all workers


@dataclass(frozen=True, slots=True)
class FleetRun:
    """All that was measured."""

    size: FleetSize
    load: Load
    workload: Arrivals
    answers: Sequence[FleetAnswer]
    started: Mapping[str, ComponentUse]  # use when all workers served, before the time without requests
    before: Mapping[str, ComponentUse]  # use when the load began
    after: Mapping[str, ComponentUse]
    decided_before: Mapping[float, float]
    decided: Mapping[float, float]
    computed_tokens: Sequence[int]  # by worker
    held: Sequence[str]  # resources held after the last answer
    faults: Sequence[StruckFault]
    resumes: int  # attempts that were interrupted, and went on elsewhere
    index: IndexUse | None  # None under faults
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

    @property
    def kept_up(self) -> bool:
        """Whether the generator sent requests in time."""
        return self.late_s < _KEEPS_UP_S

    def decision_s(self, share: float) -> float:
        """The time within which a share of the decisions came."""
        return quantile(self.decided_before, self.decided, share)


def table(runs: Sequence[FleetRun], tokenizer: Tokenizer) -> str:
    """The results in Markdown; runs differ in the number of workers."""
    where, columns = machine(), [dict(_measured(run, tokenizer)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    heads = [f"{run.size.workers:,} workers" for run in runs]
    lines = [
        f"{where['processor']}, {where['cores']} cores, {where['memory']}",
        "",
        f"| measured | {' | '.join(heads)} |",
        f"|---|{'---|' * len(runs)}",
        *(f"| {name} | {' | '.join(column.get(name, '') for column in columns)} |" for name in names),
        "",
        *_components(runs),
        *(f"\n{fault}" for run in runs for fault in _untruths(run, tokenizer)),
    ]
    return "\n".join(lines)


def _measured(run: FleetRun, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    size, answers = run.size, run.answers
    requests = [each.request for each in answers]
    n_lost, n_altered = sum(each.lost() for each in answers), sum(each.altered(tokenizer) for each in answers)
    late = "" if run.kept_up else ": it did not keep up"
    firsts = [each.first_token_s for each in answers if not each.lost()]
    pace = [each.pace_s for each in answers if not each.lost() and each.request.max_tokens > 1]
    decisions = [run.decision_s(share) * 1e3 for share in (0.5, 0.99, 0.999)]
    best_hits = best_hit_rate(requests, run.workload.language.block_tokens)
    yield "routers, gateways, coordinators", f"{size.routers}, {size.gateways}, {size.coordinators}"
    yield "requests", f"{len(answers)} in {run.load.seconds:g} s ({run.load.rate:g}/s, {run.workload.name})"
    yield "lost, altered, leaked", f"{n_lost}, {n_altered}, {len(run.held)}"
    yield "open streams, at most", f"{most_open(answers):,}"
    yield "generator late, p99", f"{run.late_s * 1e3:.1f} ms{late}"
    yield "first token p50, p99", f"{percentile(firsts, 50):.3f} s, {percentile(firsts, 99):.3f} s"
    yield "pace p50, p99", f"{percentile(pace, 50) * 1e3:.1f} ms, {percentile(pace, 99) * 1e3:.1f} ms a token"
    yield "decision p50, p99, p99.9", ", ".join(f"{each:.2f}" for each in decisions) + " ms"
    yield "prefix hits, of an oracle", f"{run.hit_rate:.1%}, {best_hits:.1%}"
    if not run.faults:  # a worker that was started again has computed nothing
        even = f"{imbalance(run.computed_tokens):.2f}, {best_imbalance(requests, size.workers):.2f}"
        yield "busiest worker over mean, of an oracle", even
    if run.index is not None:
        yield "KV events, longest lag", f"{run.index.events_per_s:.0f}/s, {run.index.lag_s:.2f} s"
    if run.convergence is not None:
        came = run.convergence
        yield "a tenth more workers join, are lost", f"{came.join_s:.2f} s, {came.loss_s:.2f} s"
        parts = (came.router_s, came.coordinator_s, came.redis_s)
        yield "a router, a coordinator, Redis are replaced", ", ".join(f"{each:.2f} s" for each in parts)
    if run.faults:
        yield "faults", "; ".join(f"{n} x {fault}" for fault, n in Counter(each.fault for each in run.faults).items())
        open_then = [each.open_streams for each in run.faults]
        yield "open streams at the faults, median, most", f"{percentile(open_then, 50):,.0f}, {max(open_then):,}"
        yield "attempts that went on elsewhere", str(run.resumes)
        yield "attempts of an answer, at most", str(max((each.interruptions.attempts for each in answers), default=0))
    memory = run.after["workers"].rss_mib / size.workers
    yield "memory a worker", f"{memory:.2f} MiB"


def _untruths(run: FleetRun, tokenizer: Tokenizer) -> Iterator[str]:
    """The first lost and altered answers, and what leaked."""
    yield from [f"lost: {each.error or 'no end'}" for each in run.answers if each.lost()][:5]
    yield from [f"altered: {each.text!r}" for each in run.answers if each.altered(tokenizer)][:5]
    yield from [f"leaked: {each}" for each in run.held[:5]]


def _components(runs: Sequence[FleetRun]) -> Iterator[str]:
    """The table of components: a row for each size, then sizes on the line through these."""
    yield f"| component | workers | processes | {' | '.join(_COSTS)} |"
    yield f"|---|---|---|{'---|' * len(_COSTS)}"
    sizes = [run.size.workers for run in runs]
    for name in runs[0].after:
        costs = [_costs(run, name) for run in runs]
        for run, cost in zip(runs, costs, strict=True):
            yield _row(name, f"{run.size.workers:,}", str(run.after[name].processes), cost)
        grown = [of for of in _GROWS if name != "workers" and all(of in cost for cost in costs)]
        if len(set(sizes)) < _FIT_FROM or not grown:
            continue
        lines = {of: np.polyfit(sizes, [cost[of] for cost in costs], 1) for of in grown}
        for size in (size for size in _FIT_TO if size > max(sizes)):
            fitted = {of: max(0.0, float(np.polyval(line, size))) for of, line in lines.items()}
            yield _row(name, f"{size:,} by a line", "", fitted)


def _row(component: str, workers: str, processes: str, costs: Mapping[str, float]) -> str:
    cells = [pattern.format(costs[name]) if name in costs else "" for name, pattern in _COSTS.items()]
    return f"| {component} | {workers} | {processes} | {' | '.join(cells)} |"


def _costs(run: FleetRun, component: str) -> dict[str, float]:
    """The costs of a component; `_COSTS` has their units. Under faults, totals of killed processes are lost."""
    after, before, started = run.after[component], run.before[component], run.started[component]
    costs = {"memory": after.rss_mib, "descriptors": after.descriptors}
    if run.faults:
        return costs
    load = after.rates(before)
    costs["CPU a request"] = (after.cpu_s - before.cpu_s) * 1e3 / max(1, len(run.answers))
    costs |= {"wake-ups/s": load.wakeups, "messages/s": load.messages, "KiB/s": load.kib}
    if before.at > started.at:
        idle = before.rates(started)
        costs |= {"CPU a second, idle": idle.cpu_s * 1e3, "messages/s, idle": idle.messages, "KiB/s, idle": idle.kib}
    return costs


def readings(run: FleetRun) -> Iterator[Reading]:
    """The results as readings."""
    name = f"fleet/{run.size.workers} workers, {run.load.rate:g}/s, {run.workload.name}"
    firsts = [each.first_token_s for each in run.answers if not each.lost()]
    yield lower(f"{name}/first token p99", percentile(firsts, 99), "s")
    for component in run.after:
        costs = _costs(run, component)
        for cost, unit in (("CPU a request", "ms"), ("messages/s", "")):
            if cost in costs:
                yield lower(f"{name}/{component} {cost}", costs[cost], unit)
