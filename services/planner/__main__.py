"""`ryzanstein plan`: workers by hour that meet targets, and what other machines and policies would change."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import cast, get_args

from pydantic import ValidationError
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from services.common.durations import read_duration
from services.common.keys import RedisKeys
from services.common.redis_client import open_redis
from services.common.settings import ServiceSettings
from services.planner.planning import HOUR_S, LatencyTarget, Measure, Need, by_hour, workers_needed
from services.planner.replay import Replayed, VirtualFleet
from services.planner.request_log import read_log
from services.planner.trace import TraceError, TraceRequest, read_trace
from services.planner.workers import WorkerKind
from services.router.policies.registry import PolicyName, make_policy
from services.router.scaling.pools import WEEKDAYS
from services.worker.simulated.curve import DEFAULT_CURVE, CurveError, StepCurve

_TARGET = re.compile(r"(first_token|pace)_p(\d+(?:\.\d+)?)=(.+)")
_EPOCH_S = 1e8  # earlier times count from a trace's begin
_REDIS_S = 10.0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """An hour of one variant of the installation."""

    curve: str
    policy: str
    start: float  # begin of the hour, in seconds since the epoch, or since the trace began
    hour: str
    requests: int
    need: Need
    price: float | None  # price of the hour, in the unit of --price
    kilojoules: float | None


def target(text: str) -> LatencyTarget:
    """Read `first_token_p95=1s`; raises ArgumentTypeError."""
    matched = _TARGET.fullmatch(text)
    try:
        if matched is None or not 0 < float(matched[2]) <= 100:
            raise ValueError("expected first_token_p95=1s or pace_p95=50ms, with a percentile above 0 and up to 100")
        seconds = read_duration(matched[3])
        if not seconds > 0:
            raise ValueError("expected a time above 0")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return LatencyTarget(cast(Measure, matched[1]), float(matched[2]) / 100, seconds)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ryzanstein plan", description=__doc__)
    add = parser.add_argument
    add("trace", nargs="?", type=Path, help="file in Mooncake's or Azure's format; default: the gateways' log in Redis")
    add("--target", type=target, action="append", required=True, help="such as first_token_p95=1s; repeatable")
    add("--curve", type=Path, action="append", help="a worker's curve, by `bench.engine --curve`; repeatable")
    add("--policy", choices=get_args(PolicyName), action="append", help="of the router; repeatable; default: cost")
    add("--model", default="", help="of the log, the requests of this model only")
    add("--load", type=_positive, default=1.0, help="requests come so many times as fast")
    add("--most", type=int, default=64, help="largest fleet to try")
    add("--cores", type=int, default=0, help="cores that workers of one thread share; default: each has its own")
    add("--price", type=_positive, help="price of a worker's hour")
    add("--watts", type=_positive, help="power of a worker that computes")
    add("--idle-watts", type=_positive, default=None, help="power of a worker that waits; default: none")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--schedule", action="store_true", help="print autoscaling.schedule of the chart, JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit status: 1 if an hour has no plan, 2 for wrong input."""
    given = _parser().parse_args(arguments)
    try:
        trace = read_trace(given.trace) if given.trace else asyncio.run(_logged(given.model))
        curves = [(str(path), StepCurve.read(path)) for path in given.curve or [DEFAULT_CURVE]]
        if given.most < 1:
            raise TraceError("--most: expected at least 1")
        if given.cores < 0:
            raise TraceError("--cores: expected at least 1, or 0: each worker has its own")
        if given.schedule:
            _check_schedule(given, trace)
    except (CurveError, TraceError) as error:
        print(f"ryzanstein plan: {error}", file=sys.stderr)  # noqa: T201
        return 2
    rows = [
        _row(given, name, curve, policy, start, faster(hour, given.load))
        for (name, curve), policy in product(curves, given.policy or ["cost"])
        for start, hour in by_hour(trace).items()
    ]
    if given.schedule:
        return _print_schedule(rows)
    _print_json(rows) if given.json else _print_table(rows, given.target)
    return int(any(row.need.workers is None for row in rows))


def _check_schedule(given: argparse.Namespace, trace: Sequence[TraceRequest]) -> None:
    """Raises TraceError."""
    if len(given.curve or ()) > 1 or len(given.policy or ()) > 1:
        raise TraceError("--schedule: expected one curve and one policy")
    if trace[0].at <= _EPOCH_S:
        raise TraceError("--schedule: the trace's times count from its begin, and name no hour of a day")


def schedule(rows: Sequence[PlanRow]) -> list[dict[str, object]]:
    """Workers by hour and weekday, in UTC: the most that a row of this hour needs."""
    floors: dict[tuple[int, int], int] = {}
    for row in rows:
        at = datetime.fromtimestamp(row.start, UTC)
        floors[at.hour, at.weekday()] = max(floors.get((at.hour, at.weekday()), 0), row.need.workers or 0)
    days: dict[tuple[int, int], list[str]] = {}
    for (hour, weekday), workers in sorted(floors.items()):
        days.setdefault((hour, workers), []).append(WEEKDAYS[weekday])
    return [{"hour": hour, "min": workers, "days": on} for (hour, workers), on in days.items()]


def faster(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, `factor` times as many a second."""
    began = trace[0].at
    return [request.moved(began + (request.at - began) / factor) for request in trace]


async def _logged(model: str) -> list[TraceRequest]:
    """The requests of the log. Raises TraceError."""
    try:
        settings = ServiceSettings()
        redis = open_redis(settings.redis, _REDIS_S)
        try:
            logged = [one async for one in read_log(redis, RedisKeys(settings.namespace))]
        finally:
            await redis.aclose()
    except (ValidationError, RedisError, OSError) as error:
        raise TraceError(f"the log in Redis cannot be read: {error}") from error
    models = sorted({one.model for one in logged})
    wanted = model or (models[0] if len(models) == 1 else "")
    if wanted not in models:
        if not models:
            raise TraceError("the log is empty: set RYZANSTEIN_REQUEST_LOG_ENTRIES of the gateways")
        raise TraceError(f"--model {model or 'is needed'}: the log has requests of {', '.join(models)}")
    return sorted((TraceRequest.of(one) for one in logged if one.model == wanted), key=lambda request: request.at)


def _row(
    given: argparse.Namespace, name: str, curve: StepCurve, policy: str, start: float, hour: Sequence[TraceRequest]
) -> PlanRow:
    kind = WorkerKind(curve, shared_cores=given.cores)

    def replay(trace: Sequence[TraceRequest], size: int) -> Replayed:
        return VirtualFleet(kind, make_policy(cast(PolicyName, policy)), size).run(trace)

    need = workers_needed(hour, given.target, replay, given.most)
    label = f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M}" if start > _EPOCH_S else f"+{start / HOUR_S:g} h"
    workers = need.workers or 0
    price = workers * given.price if given.price and workers else None
    watts = (need.busy * given.watts + (1 - need.busy) * (given.idle_watts or 0.0)) if given.watts else 0.0
    kilojoules = workers * watts * HOUR_S / 1e3 if watts and workers else None
    return PlanRow(name, policy, start, label, len(hour), need, price, kilojoules)


def _print_json(rows: Sequence[PlanRow]) -> None:
    print(json.dumps([asdict(row) for row in rows], indent=2))  # noqa: T201


def _print_schedule(rows: Sequence[PlanRow]) -> int:
    """Print the schedule, or which hours have none; returns the exit status."""
    if unplanned := [row.hour for row in rows if row.need.workers is None]:
        print(f"ryzanstein plan: no fleet of --most workers meets the targets: {', '.join(unplanned)}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(schedule(rows)))  # noqa: T201
    return 0


def _print_table(rows: Sequence[PlanRow], targets: Sequence[LatencyTarget]) -> None:
    names = (each.name for each in targets)
    table = Table("hour", "curve", "policy", "requests", "workers", "interval", *names, "busy")
    columns = {"price": [row.price for row in rows], "kJ": [row.kilojoules for row in rows]}
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    for name in columns:
        table.add_column(name)
    for index, row in enumerate(rows):
        need = row.need
        times = [f"{need.measured[each.name]:.3f} s" if need.workers else "-" for each in targets]
        costs = ["-" if (value := values[index]) is None else f"{value:.2f}" for values in columns.values()]
        table.add_row(
            row.hour,
            Path(row.curve).name,
            row.policy,
            str(row.requests),
            str(need.workers or "none"),
            f"{need.low or '?'} to {need.high or '?'}",
            *times,
            f"{need.busy:.0%}",
            *costs,
        )
    Console().print(table)
    if any(row.need.workers is None for row in rows):
        Console().print("none: no fleet of --most workers meets the targets")
    if too_long := sum(row.need.too_long for row in rows):
        Console().print(f"{too_long} requests are longer than a worker's KV cache (kv_tokens of the curve)")


if __name__ == "__main__":
    raise SystemExit(main())
