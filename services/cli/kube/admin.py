"""The certificate by which people's tools call an installation's services."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kubernetes import client

from services.cli.errors import CommandError
from services.cli.kube.cluster import ready_pods
from services.common.tls.access import ADMIN
from services.common.tls.certificate import CertificateError
from services.common.tls.credentials import Tls

_VOLUME, _OF_ROUTER = "tls", "-router"


@contextmanager
def admin_tls(namespace: str, release: str) -> Iterator[Tls | None]:
    """Yield TLS with the certificate in the secret beside the routers'; None if the routers speak plain text.

    Raises CommandError if the secret can't be read.
    """
    api = client.CoreV1Api()
    router = api.read_namespaced_pod(ready_pods(namespace, release, "router")[0], namespace)
    volumes = (router.spec and router.spec.volumes) or []
    mounted = [each.secret.secret_name for each in volumes if each.name == _VOLUME and each.secret]
    if not mounted:
        yield None
        return
    name = f"{str(mounted[0]).removesuffix(_OF_ROUTER)}-{ADMIN}"
    try:
        data = api.read_namespaced_secret(name, namespace).data or {}
    except client.ApiException as error:
        raise CommandError(f"secret {namespace}/{name}, to call the router with: {error.reason}") from error
    with TemporaryDirectory() as folder:
        for key, value in data.items():
            (Path(folder) / key).write_bytes(base64.b64decode(value))
        try:
            tls = Tls(Path(folder))
        except CertificateError as error:
            raise CommandError(f"secret {namespace}/{name}: {error}") from error
        yield tls
