"""Calls of a gateway's administration port, for the commands that administrate."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from services.cli.errors import CommandError

_LAST_S = datetime.max.replace(tzinfo=UTC).timestamp() - 86_400  # a key may end later than any date


@dataclass(frozen=True, slots=True)
class Admin:
    """An administrator at a gateway, as options of a command."""

    url: Annotated[
        str, Option(envvar="RYZANSTEIN_ADMIN_URL", help="A gateway's administration port (RYZANSTEIN_ADMIN_PORT).")
    ] = "http://127.0.0.1:8001"
    token: Annotated[str, Option(envvar="RYZANSTEIN_ADMIN_TOKEN", help="The administrator's token, or key.")] = ""
    token_file: Annotated[
        Path | None, Option(envvar="RYZANSTEIN_ADMIN_TOKEN_FILE", help="File with the token instead.")
    ] = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the gateway's answer; raises :class:`CommandError` with its message."""
        from services.cli.gateway import ask  # imported here, so that other commands start faster

        try:
            token = self.token_file.read_text().strip() if self.token_file else self.token
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--token-file {self.token_file}: cannot be read: {error}") from error
        hint = ". Is RYZANSTEIN_ADMIN_PORT set at the gateway?"
        answer: dict[str, Any] = ask(method, self.url.rstrip("/"), path, token, timeout=10, hint=hint, json=body)
        return answer


def shown_time(seconds: float) -> str:
    """A time, in seconds since the epoch, for tables; a dash for 0."""
    return datetime.fromtimestamp(min(seconds, _LAST_S), UTC).strftime("%Y-%m-%d %H:%M") if seconds else "-"
