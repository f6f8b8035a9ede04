"""`ryzanstein canary`: a model takes a route over by steps, or not, after comparisons on mirrored requests."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from services.cli.admin import Admin, shown_time
from services.cli.options import takes_options
from services.cli.routes import AsJson, Name, parsed_share
from services.cli.tables import print_listed

canary = typer.Typer(no_args_is_help=True, help="New models behind a name, compared and promoted by steps.")


@canary.command()
@takes_options
def start(
    name: Name,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The new model.")],
    share: Annotated[str, typer.Option(metavar="SHARE", help="Mirrored part of the requests.")] = "5%",
    sequences: Annotated[int, typer.Option(min=20, help="Compared sequences for each step.")] = 200,
    *,
    gateway: Admin,
) -> None:
    """Mirror a share of the requests for NAME to MODEL; promote it by steps to all requests, or roll it back."""
    body = {"model": model, "share": parsed_share("--share", share), "sequences": sequences}
    gateway.call("PUT", _path(name), body)
    print(f"{name}: {share} of the requests are mirrored to {model}")  # noqa: T201


@canary.command()
@takes_options
def status(as_json: AsJson = False, *, gateway: Admin) -> None:
    """Show all canaries: their state, its reason, and what was compared since the last step."""

    def row(each: dict[str, Any]) -> tuple[str, ...]:
        known = each["name"], each["model"], each["state"], f"{each['weight']:.0%}"
        return *known, *_compared(each), each["reason"], each["by"], shown_time(each["at"])

    titles = ("name", "model", "state", "share", "compared", "agreement", "failed", "reason", "by", "at")
    print_listed(gateway.call("GET", "/admin/canaries")["canaries"], titles, row, as_json=as_json)


@canary.command()
@takes_options
def stop(name: Name, *, gateway: Admin) -> None:
    """Stop the canary of NAME: the route is what it was before."""
    gateway.call("DELETE", _path(name))


def _compared(each: dict[str, Any]) -> tuple[str, str, str]:
    tally = each["tally"]
    agreement = f"{tally['agreement'] / tally['greedy']:.1%}" if tally["greedy"] else "-"
    count = f"{tally['sequences']:.0f} of {each['sequences']}"
    return count, agreement, f"{tally['failed']:.0f} against {tally['target_failed']:.0f}"


def _path(name: str) -> str:
    return f"/admin/canaries/{quote(name, safe='')}"
