"""Calls of a gateway's administration port, for the commands that administrate."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.errors import CommandError

HERE = "http://127.0.0.1:8001"
_LAST_S = datetime.max.replace(tzinfo=UTC).timestamp() - 86_400  # a key may end later than any date

Url = Annotated[
    str, typer.Option(envvar="RYZANSTEIN_ADMIN_URL", help="A gateway's administration port (RYZANSTEIN_ADMIN_PORT).")
]
Token = Annotated[str, typer.Option(envvar="RYZANSTEIN_ADMIN_TOKEN", help="The administrator's token, or key.")]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="RYZANSTEIN_ADMIN_TOKEN_FILE", help="File with the token instead.")
]


def shown_time(seconds: float) -> str:
    """A time, in seconds since the epoch, for tables; a dash for 0."""
    return datetime.fromtimestamp(min(seconds, _LAST_S), UTC).strftime("%Y-%m-%d %H:%M") if seconds else "-"


def call_admin(
    method: str, url: str, path: str, token: str, token_file: Path | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the gateway's answer; raises :class:`CommandError` with its message."""
    import httpx  # imported here, so that other commands start faster

    from services.cli.chat import error_message

    try:
        token = token_file.read_text().strip() if token_file else token
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--token-file {token_file}: cannot be read: {error}") from error
    headers = {"authorization": f"Bearer {token}"} if token else {}
    address = f"{url.rstrip('/')}{path}"
    try:
        answer = httpx.request(method, address, json=body, headers=headers, timeout=10, trust_env=False)
    except httpx.HTTPError as error:
        raise CommandError(f"{address}: {error}. Is RYZANSTEIN_ADMIN_PORT set at the gateway?") from error
    if answer.is_error:
        raise CommandError(error_message(answer))
    content: dict[str, Any] = answer.json() if answer.content else {}
    return content
