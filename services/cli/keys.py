"""`ryzanstein keys`: issues API keys and takes them back, over a gateway's administration port."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from services.cli.admin import Admin, shown_time
from services.cli.errors import CommandError
from services.cli.options import takes_options
from services.cli.tables import print_listed

keys = typer.Typer(no_args_is_help=True, help="API keys of an installation.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d"
_HOURS = re.compile(rf"(?P<start>{_TIME})-(?P<end>{_TIME})")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_UTC = "UTC"
_MOST = 2**53
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_month", "budget_per_month", "max_concurrent")
KeyId = Annotated[str, typer.Argument(metavar="ID")]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key, as options of a command; those that are not named stay."""

    model: Annotated[list[str] | None, typer.Option(help="A model that it may use, again for each; default: all.")] = (
        None
    )
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, max=_MOST, help="Requests a minute; 0: no limit.")
    ] = None
    tokens_per_minute: Annotated[int | None, typer.Option(min=0, max=_MOST, help="Tokens a minute; 0: no limit.")] = (
        None
    )
    tokens_per_month: Annotated[int | None, typer.Option(min=0, max=_MOST, help="Tokens a month; 0: no limit.")] = None
    budget_per_month: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="Cost a month, in the prices' currency; 0: no limit.")
    ] = None
    max_concurrent: Annotated[int | None, typer.Option(min=0, max=_MOST, help="Requests at once; 0: no limit.")] = None
    hours: Annotated[
        str | None, typer.Option(metavar="HH:MM-HH:MM", help="Hours in which it is valid; default: always.")
    ] = None
    days: Annotated[
        str | None, typer.Option(metavar="mon,tue,...", help="Days on which these hours begin; default: all.")
    ] = None
    timezone: Annotated[str, typer.Option(help="Time zone of the hours.")] = _UTC

    def body(self) -> dict[str, Any]:
        """The named fields of a body; raises :class:`CommandError`, also for an empty value.

        That may be an unset variable of a shell.
        """
        body: dict[str, Any] = {name: value for name in _LIMITS if (value := getattr(self, name)) is not None}
        if self.model:
            if not all(self.model):
                raise CommandError("--model: expected the name of a model; without the option all are allowed")
            body["models"] = self.model
        if self.hours is not None:
            body["hours"] = _window(self.hours, self.days, self.timezone)
        elif self.days is not None or self.timezone != _UTC:
            option = "--timezone" if self.days is None else "--days"
            raise CommandError(f"{option} needs --hours, such as --hours 08:00-18:00")
        return body


@keys.command()
@takes_options
def create(
    name: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is; a tenant may have several.")],
    *,
    limits: KeyLimits,
    expires_in: Annotated[str | None, typer.Option(metavar="TIME", help="30d, 12h; default: never.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May also administrate keys.")] = False,
    gateway: Admin,
) -> None:
    """Create a key and print it: it is not stored, and never shown again."""
    body = {"name": name, "admin": admin} | limits.body()
    if expires_in is not None:
        body["expires_in_s"] = seconds_of("--expires-in", expires_in)
        if not body["expires_in_s"]:
            raise CommandError(
                f"--expires-in {expires_in}: expected at least 1s; without the option it is valid for ever"
            )
    print(gateway.call("POST", "/admin/keys", body)["key"])  # noqa: T201


@keys.command("list")
@takes_options
def list_keys(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, *, gateway: Admin
) -> None:
    """Show the keys: their beginnings, tenants and limits."""
    issued = gateway.call("GET", "/admin/keys")["keys"]
    print_listed(issued, ("id", "tenant", "models", "limits", "created", "ends"), _row, as_json=as_json)


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    limits = [f"{name.replace('_', ' ')} {key[name]}" for name in _LIMITS if key.get(name)]
    window = key["hours"]
    limits += [f"{window['start']}-{window['end']} {window['timezone']}"] if window else []
    limits += ["administrator"] if key["admin"] else []
    models, times = ", ".join(key["models"]) or "all", (shown_time(key[end]) for end in ("created_at", "until"))
    return key["id"], key["name"], models, "\n".join(limits) or "none", *times


@keys.command()
@takes_options
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old key stays valid with the new one.")
    ] = "1h",
    *,
    gateway: Admin,
) -> None:
    """Print a new key with the limits of an old one, which ends after the overlap."""
    body = {"overlap_s": seconds_of("--overlap", overlap)}
    print(gateway.call("POST", f"/admin/keys/{key_id}/rotate", body)["key"])  # noqa: T201


@keys.command()
@takes_options
def limit(key_id: KeyId, *, limits: KeyLimits, gateway: Admin) -> None:
    """Change limits of a key; the ones that are not named stay."""
    gateway.call("PATCH", f"/admin/keys/{key_id}", limits.body())


@keys.command()
@takes_options
def revoke(key_id: KeyId, *, gateway: Admin) -> None:
    """Take a key back: every gateway refuses it within two seconds."""
    gateway.call("DELETE", f"/admin/keys/{key_id}")


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
