"""`ryzanstein routes`: names for models, changed while the installation runs, over a gateway's administration port."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

import typer

from services.cli.admin import Admin, shown_time
from services.cli.errors import CommandError
from services.cli.options import takes_options
from services.cli.tables import print_listed

routes = typer.Typer(no_args_is_help=True, help="Names for models, with shares and fallbacks.")

_CONDITIONS = ("no_worker", "overloaded", "context_too_long", "error")

Name = Annotated[str, typer.Argument(metavar="NAME")]
Version = Annotated[
    int | None, typer.Option(min=0, help="Only if the live route has this version; 0: only if there is none.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@routes.command("list")
@takes_options
def list_routes(as_json: AsJson = False, *, gateway: Admin) -> None:
    """Show all routes: those of the installation's file, and the live ones, which win."""

    def row(route: dict[str, Any]) -> list[str]:
        changed = (str(route.get("version", "-")), route.get("by", "-"), shown_time(route.get("at", 0)))
        return [route["name"], *_columns(route["route"]), route["source"], *changed]

    titles = ("name", "targets", "fallbacks", "mirror", "sticky", "source", "version", "by", "at")
    print_listed(gateway.call("GET", "/admin/routes")["routes"], titles, row, as_json=as_json)


@routes.command("set")
@takes_options
def set_route(
    name: Name,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[=WEIGHT]", help="A model and its weight (1 if not given), again for each."),
    ] = None,
    fallback: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL[=CONDITION,...]",
            help=f"A model that takes over, on all conditions or some of {', '.join(_CONDITIONS)}.",
        ),
    ] = None,
    sticky: Annotated[
        Literal["session", "tenant", "none"], typer.Option(help="Requests of one session, or tenant, have one target.")
    ] = "session",
    mirror: Annotated[
        str, typer.Option(metavar="MODEL=SHARE", help="A model that answers a share (5%) again, seen by no client.")
    ] = "",
    wait_s: Annotated[
        float | None,
        typer.Option(min=0.05, max=60, help="Longest search for a worker, in seconds, before a fallback takes over."),
    ] = None,
    patience_s: Annotated[
        float | None,
        typer.Option(min=0, max=86_400, help="Longest wait for a model that starts, in seconds."),
    ] = None,
    file: Annotated[str, typer.Option(metavar="FILE", help="JSON of the whole route instead; -: standard input.")] = "",
    if_version: Version = None,
    *,
    gateway: Admin,
) -> None:
    """Create or replace a live route; all gateways follow within two seconds."""
    if bool(file) == bool(target):
        raise CommandError("give --target for each model, or --file with the whole route")
    route: Any = _read(file) if file else {"targets": [_target(text) for text in target or ()], "sticky": sticky}
    if not file:
        route |= {"fallbacks": [_fallback(text) for text in fallback or ()]}
        route |= {"mirror": _mirror(mirror)} if mirror else {}
        given = {"wait_s": wait_s, "patience_s": patience_s}
        route |= {field: seconds for field, seconds in given.items() if seconds is not None}
    live = gateway.call("PUT", _path(name, if_version), route)
    print(f"{name}: version {live['version']}")  # noqa: T201


@routes.command()
@takes_options
def delete(name: Name, if_version: Version = None, *, gateway: Admin) -> None:
    """Remove a live route; one of the file with its name counts again."""
    gateway.call("DELETE", _path(name, if_version))


@routes.command()
@takes_options
def history(
    name: Annotated[str, typer.Argument(metavar="[NAME]")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Changes to show.")] = 20,
    as_json: AsJson = False,
    *,
    gateway: Admin,
) -> None:
    """Show the last changes of live routes: who made which one, and when."""
    path = f"/admin/route-changes?limit={limit}&name={quote(name, safe='')}"

    def row(change: dict[str, Any]) -> list[str]:
        columns = _columns(change["route"]) if change["route"] else [""] * 4
        made = shown_time(change["at"]), change["by"], change["action"], change["name"], str(change["version"])
        return [*made, *columns]

    titles = ("at", "by", "action", "name", "version", "targets", "fallbacks", "mirror", "sticky")
    print_listed(gateway.call("GET", path)["changes"], titles, row, as_json=as_json)


def _columns(route: dict[str, Any]) -> list[str]:
    total = sum(target["weight"] for target in route["targets"])
    targets = (f"{target['model']} {100 * target['weight'] / total:.4g} %" for target in route["targets"])
    fallbacks = (f"{_place(fallback)}: {_conditions(fallback['when'])}" for fallback in route["fallbacks"])
    mirror = route["mirror"]
    mirrored = f"{mirror['model']} {100 * mirror['share']:.4g} %" if mirror else ""
    return ["\n".join(targets), "\n".join(fallbacks), mirrored, route["sticky"]]


def _place(fallback: dict[str, Any]) -> str:
    return f"{fallback['model']} ({fallback['external']})" if fallback["external"] else str(fallback["model"])


def _conditions(when: list[str]) -> str:
    return "all" if {*when} == {*_CONDITIONS} else ", ".join(when)


def _path(name: str, if_version: int | None) -> str:
    return f"/admin/routes/{quote(name, safe='')}" + ("" if if_version is None else f"?if_version={if_version}")


def _target(text: str) -> dict[str, Any]:
    """A name may have an equals sign: only a number behind the last one is a weight."""
    model, _, weight = text.rpartition("=")
    return {"model": model, "weight": int(weight)} if model and weight.isdecimal() else {"model": text}


def _fallback(text: str) -> dict[str, Any]:
    model, _, when = text.rpartition("=")
    conditions = when.split(",")
    if not model:
        return {"model": text}
    if not {*conditions} <= {*_CONDITIONS}:
        raise CommandError(
            f"--fallback {text}: expected conditions behind the last =: some of {', '.join(_CONDITIONS)}"
        )
    return {"model": model, "when": conditions}


def _mirror(text: str) -> dict[str, Any]:
    model, _, share = text.rpartition("=")
    return {"model": model, "share": parsed_share("--mirror", share)}


def parsed_share(option: str, text: str) -> float:
    """A share between 0 and 1, written as 5% or 0.05; raises :class:`CommandError`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise CommandError(f"{option} {text}: expected a share such as 5% or 0.05")
    return share


def _read(file: str) -> object:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"--file {file}: cannot be read: {error}") from error
