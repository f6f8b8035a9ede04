"""`ryzanstein trace`: shows where the time of one request went, from its spans in Jaeger."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.errors import CommandError
from services.cli.tables import plain_console, print_whole

_TIMEOUT_S = 10.0
_LOOKBACK_S = 7 * 24 * 3600
_ARRIVALS = "ryzanstein-gateway"
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_BAR = 24  # characters
# The tags of a span that explain its duration.
_TELLING = re.compile(
    r"ryzanstein\.(?!request_id|generation_id)|http\.(response\.)?status_code|error|rpc\.grpc\.status"
)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span. Times are milliseconds: `start` since the trace began, `own` without the time of children."""

    name: str
    service: str
    start: float
    duration: float
    own: float
    depth: int
    tags: dict[str, str]


def show(request: str, jaeger: str, *, as_json: bool) -> None:
    """Print the trace of a request, by request id or trace id; raises CommandError if Jaeger has none."""
    spans = arranged(_find(request, jaeger.rstrip("/")))
    if as_json:
        print(json.dumps([{name: getattr(span, name) for name in TraceSpan.__slots__} for span in spans], indent=2))  # noqa: T201
        return
    _print(plain_console(), request, spans)


def _find(request: str, jaeger: str) -> dict[str, Any]:
    """The trace as Jaeger returns it, with spans and processes."""
    if _TRACE_ID.fullmatch(request):
        traces = _get(f"{jaeger}/api/traces/{request}", {})
    else:
        now = int(time.time() * 1e6)
        tags = json.dumps({"ryzanstein.request_id": request})
        window = {"start": now - int(_LOOKBACK_S * 1e6), "end": now, "lookback": "custom"}
        traces = _get(f"{jaeger}/api/traces", {"service": _ARRIVALS, "tags": tags, "limit": 1, **window})
    if not traces:
        raise CommandError(
            f"Jaeger at {jaeger} has no trace of {request}: it was not sampled (tracing.ratio; a client's "
            "`traceparent` with the flag 01 always is), is not exported yet (5 s), or is older than what Jaeger keeps"
        )
    trace: dict[str, Any] = traces[0]
    return trace


def _get(url: str, query: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(url, params=query, timeout=_TIMEOUT_S, trust_env=False)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        answer.raise_for_status()
        return answer.json()["data"] or []
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise CommandError(
            f"{url} does not answer as Jaeger does ({error}); in Kubernetes: "
            "kubectl -n NAMESPACE port-forward service/RELEASE-jaeger 16686"
        ) from error


def arranged(trace: dict[str, Any]) -> list[TraceSpan]:
    """The spans in the order of their tree, children by their start."""
    raw = {span["spanID"]: span for span in trace["spans"]}
    children: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in raw.values():
        parents = [ref["spanID"] for ref in span.get("references", ()) if ref["refType"] == "CHILD_OF"]
        children[parents[0] if parents and parents[0] in raw else ""].append(span)
    began = min(span["startTime"] for span in raw.values())

    def walk(parent: str, depth: int) -> Iterator[TraceSpan]:
        for span in sorted(children[parent], key=lambda span: span["startTime"]):
            yield TraceSpan(
                name=span["operationName"],
                service=trace["processes"][span["processID"]]["serviceName"].removeprefix("ryzanstein-"),
                start=(span["startTime"] - began) / 1e3,
                duration=span["duration"] / 1e3,
                own=_uncovered(span, children[span["spanID"]]) / 1e3,
                depth=depth,
                tags={tag["key"]: str(tag["value"]) for tag in span.get("tags", ()) if _TELLING.match(tag["key"])},
            )
            yield from walk(span["spanID"], depth + 1)

    return list(walk("", 0))


def _uncovered(span: dict[str, Any], children: Sequence[dict[str, Any]]) -> float:
    """Microseconds of a span in which no child ran. Children may overlap, and end later than the span."""
    begin, end = span["startTime"], span["startTime"] + span["duration"]
    covered, reached = 0, begin
    for child in sorted(children, key=lambda child: child["startTime"]):
        start, stop = max(child["startTime"], reached), min(child["startTime"] + child["duration"], end)
        if stop > start:
            covered, reached = covered + stop - start, stop
    return float(end - begin - covered)


def _print(console: Console, request: str, spans: Sequence[TraceSpan]) -> None:
    whole = max(span.start + span.duration for span in spans)
    table = Table(
        "span", "service", "from ms", "took ms", "", title=f"Request {request}: {whole:.1f} ms", title_justify="left"
    )
    for span in spans:
        tags = ", ".join(f"{key.removeprefix('ryzanstein.')}={value}" for key, value in span.tags.items())
        name = Text("  " * span.depth + span.name)
        if tags:
            name.append(f"\n{'  ' * span.depth}{tags}", style="dim")
        table.add_row(name, span.service, f"{span.start:.1f}", f"{span.duration:.1f}", _bar(span, whole))
    print_whole(console, table)
    for span in sorted(spans, key=lambda span: -span.own)[:3]:
        if span.own > 0:
            share = span.own / max(whole, 1e-9)
            console.print(f"{share:5.0%}  {span.own:.1f} ms in {span.name} of the {span.service}", highlight=False)


def _bar(span: TraceSpan, whole: float) -> str:
    first = int(_BAR * span.start / max(whole, 1e-9))
    return " " * first + "▆" * max(1, round(_BAR * span.duration / max(whole, 1e-9)))
