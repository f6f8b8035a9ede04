"""`ryzanstein keys`: issues API keys and takes them back, over a gateway's administration port."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from rich.table import Table

from services.cli.admin import HERE, Token, TokenFile, Url, call_admin, shown_time
from services.cli.errors import CommandError
from services.cli.tables import plain_console, print_whole

keys = typer.Typer(no_args_is_help=True, help="API keys of an installation.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d"
_HOURS = re.compile(rf"(?P<start>{_TIME})-(?P<end>{_TIME})")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_UTC = "UTC"
_MOST = 2**53
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_month", "budget_per_month", "max_concurrent")

Model = Annotated[list[str] | None, typer.Option(help="A model that it may use, again for each; default: all.")]
PerMinute = Annotated[int | None, typer.Option(min=0, max=_MOST, help="Requests a minute; 0: no limit.")]
TokensPerMinute = Annotated[int | None, typer.Option(min=0, max=_MOST, help="Tokens a minute; 0: no limit.")]
TokensPerMonth = Annotated[int | None, typer.Option(min=0, max=_MOST, help="Tokens a month; 0: no limit.")]
Budget = Annotated[
    float | None, typer.Option(min=0, max=1e9, help="Cost a month, in the prices' currency; 0: no limit.")
]
Concurrent = Annotated[int | None, typer.Option(min=0, max=_MOST, help="Requests at once; 0: no limit.")]
Hours = Annotated[str | None, typer.Option(metavar="HH:MM-HH:MM", help="Hours in which it is valid; default: always.")]
Days = Annotated[str | None, typer.Option(metavar="mon,tue,...", help="Days on which these hours begin; default: all.")]
Timezone = Annotated[str, typer.Option(help="Time zone of the hours.")]


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is; a tenant may have several.")],
    model: Model = None,
    requests_per_minute: PerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_month: TokensPerMonth = None,
    budget_per_month: Budget = None,
    max_concurrent: Concurrent = None,
    hours: Hours = None,
    days: Days = None,
    timezone: Timezone = _UTC,
    expires_in: Annotated[str | None, typer.Option(metavar="TIME", help="30d, 12h; default: never.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May administrate keys, too.")] = False,
    url: Url = HERE,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Create a key and print it: it is not stored, and never shown again."""
    limits = (requests_per_minute, tokens_per_minute, tokens_per_month, budget_per_month, max_concurrent)
    body = {"name": name, "admin": admin} | _changes(model, limits, hours, days, timezone)
    if expires_in is not None:
        body["expires_in_s"] = seconds_of("--expires-in", expires_in)
        if not body["expires_in_s"]:
            raise CommandError(
                f"--expires-in {expires_in}: expected at least 1s; without the option it is valid for ever"
            )
    print(call_admin("POST", url, "/admin/keys", token, token_file, body)["key"])  # noqa: T201


@keys.command("list")
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    url: Url = HERE,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Show the keys: their beginnings, tenants and limits."""
    issued = call_admin("GET", url, "/admin/keys", token, token_file)["keys"]
    if as_json:
        print(json.dumps(issued, indent=1))  # noqa: T201
        return
    table = Table("id", "tenant", "models", "limits", "created", "ends")
    for key in issued:
        limits = [f"{name.replace('_', ' ')} {key[name]}" for name in _LIMITS if key.get(name)]
        window = key["hours"]
        limits += [f"{window['start']}-{window['end']} {window['timezone']}"] if window else []
        limits += ["administrator"] if key["admin"] else []
        models = ", ".join(key["models"]) or "all"
        table.add_row(
            key["id"],
            key["name"],
            models,
            "\n".join(limits) or "none",
            shown_time(key["created_at"]),
            shown_time(key["until"]),
        )
    print_whole(plain_console(), table)


@keys.command()
def rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    overlap: Annotated[str, typer.Option(metavar="TIME", help="How long the old key is valid beside the new.")] = "1h",
    url: Url = HERE,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Print a new key with the limits of an old one, which ends after the overlap."""
    body = {"overlap_s": seconds_of("--overlap", overlap)}
    print(call_admin("POST", url, f"/admin/keys/{key_id}/rotate", token, token_file, body)["key"])  # noqa: T201


@keys.command()
def limit(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    model: Model = None,
    requests_per_minute: PerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_month: TokensPerMonth = None,
    budget_per_month: Budget = None,
    max_concurrent: Concurrent = None,
    hours: Hours = None,
    days: Days = None,
    timezone: Timezone = _UTC,
    url: Url = HERE,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Change limits of a key; the ones that are not named stay."""
    limits = (requests_per_minute, tokens_per_minute, tokens_per_month, budget_per_month, max_concurrent)
    call_admin("PATCH", url, f"/admin/keys/{key_id}", token, token_file, _changes(model, limits, hours, days, timezone))


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    url: Url = HERE,
    token: Token = "",
    token_file: TokenFile = None,
) -> None:
    """Take a key back: every gateway refuses it within two seconds."""
    call_admin("DELETE", url, f"/admin/keys/{key_id}", token, token_file)


def _changes(
    models: list[str] | None, limits: Sequence[float | None], hours: str | None, days: str | None, timezone: str
) -> dict[str, Any]:
    """The fields of a body that options name. An empty value is refused: it may be an unset variable of a shell."""
    body: dict[str, Any] = {name: value for name, value in zip(_LIMITS, limits, strict=True) if value is not None}
    if models:
        if not all(models):
            raise CommandError("--model: expected the name of a model; without the option all are allowed")
        body["models"] = models
    if hours is not None:
        body["hours"] = _window(hours, days, timezone)
    elif days is not None or timezone != _UTC:
        option = "--timezone" if days is None else "--days"
        raise CommandError(f"{option} needs --hours, such as --hours 08:00-18:00")
    return body


def _window(hours: str, days: str | None, timezone: str) -> dict[str, Any]:
    """The hours of a key; raises :class:`CommandError` naming the option that is wrong."""
    window = _HOURS.fullmatch(hours.replace(" ", ""))
    if not window:
        raise CommandError(f"--hours {hours}: expected two times of a day, such as 08:00-18:00 or 22:00-06:00")
    try:
        if timezone not in (_UTC, "Etc/UTC"):
            ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise CommandError(f"--timezone {timezone}: no time zone; a name such as Europe/Berlin or UTC") from error
    limits: dict[str, Any] = {"start": window["start"], "end": window["end"], "timezone": timezone}
    if days is not None:
        limits["days"] = [day.strip().lower() for day in days.split(",")]
        if not {*limits["days"]} <= {*_DAYS}:
            raise CommandError(f"--days {days}: expected some of {','.join(_DAYS)}, such as mon,tue,wed")
    return limits


def seconds_of(option: str, text: str) -> int:
    """A time such as 30d, in seconds; raises :class:`CommandError` naming the option."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if not match:
        raise CommandError(f"{option} {text}: expected a number and a unit, such as 90s, 30m, 12h or 30d")
    return int(match[1]) * _UNITS[match[2]]
