"""`ryzanstein kube`: commands for an installation in Kubernetes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from services.cli.errors import CommandError

kube = typer.Typer(no_args_is_help=True, help="Look after an installation in Kubernetes.")

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Default: that of the kubeconfig, else of this pod.")]
Release = Annotated[str, typer.Option(help="The name given to `helm install`; default: the only one there.")]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig; default: the current one.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@kube.callback()
def describe() -> None:
    """Look after an installation in Kubernetes."""


@kube.command("ensure-secrets")
def ensure_secrets(
    name: Annotated[list[str], typer.Option(help="A secret that must exist; repeat for more.")],
    key: Annotated[list[str] | None, typer.Option(help="A key in it for a password; default: password.")] = None,
    namespace: Namespace = "",
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Labels of a secret made here.")] = None,
) -> None:
    """Make the secrets that are missing, with random passwords. One that exists is never changed."""
    from services.cli.kube import cluster, secrets  # imported here: the client takes half a second to import

    labels = _pairs("--label", label)
    cluster.connect()
    where = namespace or cluster.current_namespace()
    for secret in name:
        made = secrets.ensure_passwords(where, secret, key or ["password"], labels)
        Console().print(f"secret {where}/{secret} {'made' if made else 'is there already'}", highlight=False)


@kube.command("ensure-certificates")
def ensure_certificates(
    prefix: Annotated[str, typer.Option(help="The secrets are PREFIX-ca and PREFIX-COMPONENT.")],
    domain: Annotated[str, typer.Option(metavar="RELEASE.NAMESPACE", help="What all names have in common.")],
    component: Annotated[list[str], typer.Option(help="A component that needs a certificate; repeat for more.")],
    namespace: Namespace = "",
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Labels of a secret made here.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="COMPONENT=NAME", help="A DNS name besides RELEASE.NAMESPACE's.")
    ] = None,
    new_authority: Annotated[bool, typer.Option("--new-authority", help="Replace the CA; later runs finish.")] = False,
) -> None:
    """Make the certificates that are missing, and renew those in the last third of their lives.

    Services read them again by themselves. A new CA is trusted first; runs ten minutes later issue by it and forget the
    old one.
    """
    from services.cli.kube import certificates, cluster

    labels, hosts = _pairs("--label", label), _pairs("--host", host)
    cluster.connect()
    where = namespace or cluster.current_namespace()
    plan = certificates.CertificatePlan(where, prefix, domain, component, labels, hosts)
    changed = certificates.ensure(plan, replace_authority=new_authority)
    for name in changed:
        Console().print(f"secret {where}/{name} written", highlight=False)
    if not changed:
        Console().print(f"no certificate of {where}/{prefix} has to be renewed", highlight=False)


@kube.command()
def doctor(namespace: Namespace = "", release: Release = "", context: Context = "", as_json: AsJson = False) -> None:
    """Say why an installation is Pending, not ready, restarting, unscraped or unreachable, and what to type.

    Reads only. Exit status 1 when something is wrong now; past restarts are also listed.
    """
    from services.cli.kube import cluster
    from services.cli.kube import doctor as command

    cluster.connect(context)
    snapshot = cluster.read(namespace or cluster.current_namespace(context), release)
    if command.report(snapshot, as_json=as_json):
        raise typer.Exit(1)


@kube.command()
def status(namespace: Namespace = "", release: Release = "", context: Context = "", as_json: AsJson = False) -> None:
    """Show workers, load and KV use, as the router sees them, through a port-forward."""
    from services.cli.kube import cluster, workers

    cluster.connect(context)
    where = namespace or cluster.current_namespace(context)
    workers.show_status(where, release or cluster.only_release(where), as_json=as_json)


@kube.command("drain-worker")
def drain_worker(
    pod: Annotated[str, typer.Argument(metavar="POD", help="The worker's pod.")],
    grace: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds that running requests may go on.")] = 30.0,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the pod then.")] = False,
    namespace: Namespace = "",
    release: Release = "",
    context: Context = "",
) -> None:
    """Empty a worker, for work on its node or GPU, and delete its pod: streams go on elsewhere."""
    from services.cli.kube import cluster, workers

    cluster.connect(context)
    where = namespace or cluster.current_namespace(context)
    workers.drain(where, release or cluster.only_release(where), pod, grace, keep=keep)


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for pair in given or []:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise CommandError(f"{option} {pair}: expected NAME=VALUE")
        pairs[name] = value
    return pairs
