"""`ryzanstein plan`: workers by hour that meet targets, and what other machines and policies would change."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
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
from services.planner.picture import picture
from services.planner.planning import HOUR_S, LatencyTarget, Measure, by_hour, workers_needed
from services.planner.replay import Replayed, VirtualFleet
from services.planner.request_log import read_log
from services.planner.rows import PlanRow, schedule
from services.planner.serving import serve
from services.planner.tiers import TierKind
from services.planner.trace import TraceError, TraceRequest, read_trace
from services.planner.workers import WorkerKind
from services.router.policies.registry import PolicyName, make_policy
from services.worker.simulated.curve import DEFAULT_CURVE, CurveError, StepCurve

_TARGET = re.compile(r"(first_token|pace)_p(\d+(?:\.\d+)?)=(.+)")
_TIER = re.compile(r"(\d+)@(\d+(?:\.\d+)?)")
_NO_TIER = "none"
_EPOCH_S = 1e8  # earlier times count from a trace's begin
_REDIS_S = 10.0
_RENEW_S = 3600.0


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


def tier(text: str) -> tuple[str, TierKind | None]:
    """Read `200000@50000`, tokens and tokens a second, or `none`; raises ArgumentTypeError."""
    matched = _TIER.fullmatch(text)
    if matched is None and text != _NO_TIER:
        raise argparse.ArgumentTypeError(f"{text}: expected tokens@tokens a second, such as 200000@50000, or none")
    kind = TierKind(int(matched[1]), float(matched[2])) if matched else None
    if kind and not kind.tokens_per_s:
        raise argparse.ArgumentTypeError(f"{text}: expected a speed above 0")
    return text, kind


def address(text: str) -> tuple[str, int]:
    """Read `127.0.0.1:8090`; raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: expected an address and a port, such as 127.0.0.1:8090")
    return host, int(port)


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
    add("--tier", type=tier, action="append", help="tokens@tokens a second below the KV cache, or none; repeatable")
    add("--model", default="", help="of the log, the requests of this model only")
    add("--load", type=_positive, default=1.0, help="requests come so many times as fast")
    add("--most", type=int, default=64, help="largest fleet to try")
    add("--cores", type=int, default=0, help="cores that workers of one thread share; default: each has its own")
    add("--price", type=_positive, help="price of a worker's hour")
    add("--watts", type=_positive, help="power of a worker that computes")
    add("--idle-watts", type=_positive, default=None, help="power of a worker that waits; default: none")
    add("--picture", type=Path, help="write the plan there, as SVG")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--schedule", action="store_true", help="print autoscaling.schedule of the chart, JSON")
    form.add_argument("--serve", type=address, help="answer GET /v1/plan there, with a new plan every hour")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; returns the exit status: 1 if an hour has no plan, 2 for wrong input."""
    given = _parser().parse_args(arguments)
    try:
        if given.most < 1:
            raise TraceError("--most: expected at least 1")
        if given.cores < 0:
            raise TraceError("--cores: expected at least 1, or 0: each worker has its own")
        if given.schedule or given.serve:
            _check_variants(given)
        if given.serve:
            host, port = given.serve
            serve(lambda: plan(given), given.most, host, port, _RENEW_S)
        rows = plan(given)
        if given.picture:
            given.picture.write_text(picture(rows))
    except (CurveError, TraceError, OSError) as error:
        print(f"ryzanstein plan: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if given.schedule:
        return _print_schedule(rows)
    _print_json(rows) if given.json else _print_table(rows, given.target)
    return int(any(row.need.workers is None for row in rows))


def plan(given: argparse.Namespace) -> list[PlanRow]:
    """A row for each hour of each variant. Raises TraceError and CurveError."""
    trace = read_trace(given.trace) if given.trace else asyncio.run(_logged(given.model))
    curves = [(str(path), StepCurve.read(path)) for path in given.curve or [DEFAULT_CURVE]]
    if (given.schedule or given.serve) and trace[0].at <= _EPOCH_S:
        raise TraceError(f"{_form(given)}: the trace's times count from its begin, and name no hour of a day")
    return [
        _row(given, name, WorkerKind(curve, shared_cores=given.cores, tier=kind), tier_name, policy, start, hour)
        for (name, curve), policy, (tier_name, kind) in product(
            curves, given.policy or ["cost"], given.tier or [(_NO_TIER, None)]
        )
        for start, hour in by_hour(trace).items()
    ]


def _check_variants(given: argparse.Namespace) -> None:
    """Raises TraceError."""
    if any(len(variants or ()) > 1 for variants in (given.curve, given.policy, given.tier)):
        raise TraceError(f"{_form(given)}: expected one curve, one policy and one tier")


def _form(given: argparse.Namespace) -> str:
    return "--schedule" if given.schedule else "--serve"


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
    given: argparse.Namespace,
    curve: str,
    kind: WorkerKind,
    tier_name: str,
    policy: str,
    start: float,
    hour: Sequence[TraceRequest],
) -> PlanRow:
    def replay(trace: Sequence[TraceRequest], size: int) -> Replayed:
        return VirtualFleet(kind, make_policy(cast(PolicyName, policy)), size).run(trace)

    trace = faster(hour, given.load)
    need = workers_needed(trace, given.target, replay, given.most)
    label = f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M}" if start > _EPOCH_S else f"+{start / HOUR_S:g} h"
    workers = need.workers or 0
    price = workers * given.price if given.price and workers else None
    watts = (need.busy * given.watts + (1 - need.busy) * (given.idle_watts or 0.0)) if given.watts else 0.0
    kilojoules = workers * watts * HOUR_S / 1e3 if watts and workers else None
    return PlanRow(curve, policy, tier_name, start, label, len(hour), need, price, kilojoules)


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
    costs = {"price": [row.price for row in rows], "kJ": [row.kilojoules for row in rows]}
    columns = {
        name: ["-" if value is None else f"{value:.2f}" for value in values]
        for name, values in costs.items()
        if any(value is not None for value in values)
    }
    if any(row.tier != _NO_TIER for row in rows):
        columns["tier"] = [row.tier for row in rows]
    for name in columns:
        table.add_column(name)
    for index, row in enumerate(rows):
        need = row.need
        times = [f"{need.measured[each.name]:.3f} s" if need.workers else "-" for each in targets]
        table.add_row(
            row.hour,
            Path(row.curve).name,
            row.policy,
            str(row.requests),
            str(need.workers or "none"),
            f"{need.low or '?'} to {need.high or '?'}",
            *times,
            f"{need.busy:.0%}",
            *(values[index] for values in columns.values()),
        )
    Console().print(table)
    if any(row.need.workers is None for row in rows):
        Console().print("none: no fleet of --most workers meets the targets")
    if too_long := sum(row.need.too_long for row in rows):
        Console().print(f"{too_long} requests are longer than a worker's KV cache (kv_tokens of the curve)")


if __name__ == "__main__":
    raise SystemExit(main())
