"""Creates the secrets that an installation needs before its pods can start."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence

from kubernetes import client

from services.cli.errors import CommandError
from services.cli.kube.cluster import asking, secret

_PASSWORD_BYTES = 32
_ALREADY_EXISTS = 409


def ensure_passwords(namespace: str, name: str, keys: Sequence[str], labels: dict[str, str]) -> bool:
    """Create the secret `name` with a random URL-safe password under each key; never change an existing one.

    Return whether it was created now.

    Raises:
        CommandError: it exists without one of `keys`, or the API server refuses.
    """
    if (stored := secret(namespace, name)) is not None:
        if missing := [key for key in keys if key not in (stored.data or {})]:
            there = f"only {sorted(stored.data or {})}; add it or delete the secret"
            raise CommandError(f"secret {namespace}/{name} has no key {missing[0]!r}, {there}")
        return False
    wanted = client.V1Secret(
        metadata=client.V1ObjectMeta(name=name, labels=labels),
        type="Opaque",
        data={key: base64.b64encode(secrets.token_urlsafe(_PASSWORD_BYTES).encode()).decode() for key in keys},
    )
    with asking(f"secret {namespace}/{name}"):
        try:
            client.CoreV1Api().create_namespaced_secret(namespace, wanted)
        except client.ApiException as error:
            if error.status != _ALREADY_EXISTS:  # another run of this Job has created it meanwhile
                raise
            return False
    return True
