"""Prints tables whole, and names as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 10_000  # wider than any table


def plain_console() -> Console:
    """A console that prints names as they are: neither `[word]` nor `:word:` is markup."""
    return Console(markup=False, emoji=False, highlight=False)


def width_of(console: Console, table: Table) -> int:
    """The columns that a table takes when no cell is cut or folded."""
    return Measurement.get(console, console.options.update(width=_WIDEST), table).maximum


def print_whole(console: Console, table: Table) -> None:
    """Print a table without cutting a cell: lines may be wider than the terminal, or than the 80 columns of a pipe."""
    before, console.width = console.width, max(console.width, width_of(console, table))
    try:
        console.print(table)
    finally:
        console.width = before


def print_listed(
    listed: Sequence[dict[str, Any]],
    titles: Sequence[str],
    row: Callable[[dict[str, Any]], Iterable[str]],
    *,
    as_json: bool,
) -> None:
    """Print what a gateway lists: a row for each, or JSON."""
    if as_json:
        print(json.dumps(listed, indent=1))  # noqa: T201
        return
    table = Table(*titles)
    for each in listed:
        table.add_row(*row(each))
    print_whole(plain_console(), table)
