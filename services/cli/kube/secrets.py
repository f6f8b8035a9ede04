"""Creates the secrets that an installation needs before its pods can start."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from pathlib import Path

from kubernetes import client, config

from services.cli.errors import CommandError

_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PASSWORD_BYTES = 32
_ALREADY_EXISTS = 409
_NOT_FOUND = 404


def connect() -> client.CoreV1Api:
    """The API of the kubeconfig's cluster, else of the cluster that this pod runs in.

    Raises:
        CommandError: there is neither.
    """
    try:
        config.load_config()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise CommandError(f"no Kubernetes cluster: {error}") from error
    return client.CoreV1Api()


def own_namespace() -> str:
    """The namespace that this pod runs in, `default` outside of a pod."""
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except FileNotFoundError:
        return "default"


def ensure_passwords(
    api: client.CoreV1Api, namespace: str, name: str, keys: Sequence[str], labels: dict[str, str]
) -> bool:
    """Create the secret `name` with a random URL-safe password under each key; never change an existing one.

    Return whether it was created now.

    Raises:
        CommandError: it exists without one of `keys`, or the API server refuses.
    """
    secret = client.V1Secret(
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        type="Opaque",
        data={key: base64.b64encode(secrets.token_urlsafe(_PASSWORD_BYTES).encode()).decode() for key in keys},
    )
    try:
        if _has_keys(api, namespace, name, keys):
            return False
        api.create_namespaced_secret(namespace, secret)
    except client.ApiException as error:
        if error.status == _ALREADY_EXISTS:  # another run of this Job has created it meanwhile
            return False
        raise CommandError(f"secret {namespace}/{name}: {error.reason} ({error.status})") from error
    return True


def _has_keys(api: client.CoreV1Api, namespace: str, name: str, keys: Sequence[str]) -> bool:
    try:
        data = api.read_namespaced_secret(name, namespace).data or {}
    except client.ApiException as error:
        if error.status == _NOT_FOUND:
            return False
        raise
    if missing := [key for key in keys if key not in data]:
        raise CommandError(
            f"secret {namespace}/{name} has no key {missing[0]!r}, only {sorted(data)}; add it or delete the secret"
        )
    return True
