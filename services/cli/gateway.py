"""Requests to a gateway, for the commands that call one."""

from __future__ import annotations

from typing import Any

import httpx

from services.cli.errors import CommandError


def ask(
    method: str, url: str, path: str, api_key: str = "", *, timeout: float = 60, hint: str = "", **request: Any
) -> Any:
    """Return an answer's JSON, {} for an empty one; raises CommandError with the gateway's message.

    `hint` ends the message for a gateway that does not answer.
    """
    try:
        answer = httpx.request(
            method, f"{url}{path}", headers=authorization(api_key), timeout=timeout, trust_env=False, **request
        )
    except httpx.HTTPError as error:
        raise CommandError(f"{url} does not answer: {error}{hint}") from error
    if answer.is_error:
        raise CommandError(error_message(answer))
    return answer.json() if answer.content else {}


def error_message(answer: httpx.Response) -> str:
    """The message of an OpenAI-shaped error, else the body; for an empty one, the status."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text or f"{answer.url} answered {answer.status_code}"


def authorization(api_key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
