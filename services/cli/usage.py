"""`ryzanstein usage`: what was used and what it cost, by bucket of time, from the gateway's usage API."""

from __future__ import annotations

import csv
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from rich.table import Table

from services.cli.errors import CommandError
from services.cli.gateway import ask
from services.cli.tables import plain_console, print_whole

GROUPS = {"tenant": "project_id", "key": "api_key_id", "model": "model", "batch": "batch"}
_SUMS = {
    "requests": "num_model_requests",
    "input": "input_tokens",
    "cached": "input_cached_tokens",
    "output": "output_tokens",
    "accepted": "accepted_prediction_tokens",
    "rejected": "rejected_prediction_tokens",
}
_REPORTS = ("usage/completions", "usage/embeddings", "costs")
_STARTS = {"1m": "%Y-%m-%d %H:%M", "1h": "%Y-%m-%d %H:%M", "1d": "%Y-%m-%d"}

Row = tuple[str, ...]  # the bucket's start, and what the report is grouped by


@dataclass(frozen=True, slots=True)
class TableQuery:
    """A report of the last `since_s` seconds."""

    url: str
    api_key: str
    since_s: int
    width: str
    by: Sequence[str]  # some of GROUPS

    def buckets(self, report: str) -> Iterator[dict[str, Any]]:
        """The buckets of one report, page after page; raises :class:`CommandError`."""
        query: dict[str, Any] = {
            "start_time": int(time.time()) - self.since_s,
            "bucket_width": self.width,
            "group_by": [GROUPS[name] for name in self.by],
        }
        while query:
            page = ask("GET", self.url, f"/v1/organization/{report}", self.api_key, params=query)
            yield from page["data"]
            query = {**query, "page": page["next_page"]} if page["has_more"] else {}


def checked_groups(names: Sequence[str]) -> Sequence[str]:
    """Names of `--by`, each once; raises :class:`CommandError`."""
    for name in names:
        if name not in GROUPS:
            raise CommandError(f"--by {name}: expected {', '.join(GROUPS)}; the option may be given several times")
    return list(dict.fromkeys(names))


def run(query: TableQuery, *, as_csv: bool) -> None:
    """Print the report."""
    rows: dict[Row, Counter[str]] = {}
    currency = ""
    for bucket in chain.from_iterable(map(query.buckets, _REPORTS)):
        start = datetime.fromtimestamp(bucket["start_time"], UTC).strftime(_STARTS[query.width])
        for result in bucket["results"]:
            row = start, *(_shown(result[GROUPS[name]]) for name in query.by)
            sums = rows.setdefault(row, Counter())
            sums.update({name: result.get(field, 0) for name, field in _SUMS.items()})
            if amount := result.get("amount"):
                currency = amount["currency"]
                sums["cost"] += amount["value"]
    titles = ["start (UTC)", *query.by, *_SUMS, f"cost ({currency})" if currency else "cost"]
    lines = [[*row, *(str(sums[name]) for name in _SUMS), f"{sums['cost']:.6f}"] for row, sums in sorted(rows.items())]
    (_print_csv if as_csv else _print_table)(titles, lines)


def _shown(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_csv(titles: list[str], lines: list[list[str]]) -> None:
    csv.writer(sys.stdout, lineterminator="\n").writerows([titles, *lines])


def _print_table(titles: list[str], lines: list[list[str]]) -> None:
    table = Table()
    numbers = len(_SUMS) + 1
    for position, title in enumerate(titles):
        table.add_column(title, justify="right" if position >= len(titles) - numbers else "left")
    for line in lines:
        table.add_row(*line)
    print_whole(plain_console(), table)
