"""`ryzanstein kube`: what an installation in Kubernetes needs from inside or about its cluster."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from services.cli.errors import CommandError

kube = typer.Typer(no_args_is_help=True, help="Look after an installation in Kubernetes.")


@kube.callback()
def describe() -> None:
    """Look after an installation in Kubernetes."""


@kube.command("ensure-secrets")
def ensure_secrets(
    name: Annotated[list[str], typer.Option(help="A secret that must exist; repeat for more.")],
    key: Annotated[str, typer.Option(help="The key in it that holds the password.")] = "password",
    namespace: Annotated[str, typer.Option(help="Default: the one that this pod runs in.")] = "",
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Labels of a secret made here.")] = None,
) -> None:
    """Make the secrets that are missing, with random passwords. One that exists is never changed."""
    from services.cli.kube import secrets  # the client takes half a second to import

    labels = dict(_split(pair) for pair in label or [])
    where = namespace or secrets.own_namespace()
    api = secrets.connect()
    for secret in name:
        made = secrets.ensure_password(api, where, secret, key, labels)
        Console().print(f"secret {where}/{secret} {'made' if made else 'is there already'}", highlight=False)


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not (name and equals):
        raise CommandError(f"--label {pair}: expected NAME=VALUE")
    return name, value
