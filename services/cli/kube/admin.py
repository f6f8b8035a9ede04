"""The certificate by which people's tools call an installation's services."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kubernetes import client

from services.cli.errors import CommandError
from services.cli.kube.cluster import TLS_VOLUME, asking
from services.cli.kube.diagnosis.snapshot import Object
from services.common.tls.access import ADMIN
from services.common.tls.certificate import CertificateError
from services.common.tls.credentials import Tls

_OF_ROUTER = "-router"


@contextmanager
def admin_tls(namespace: str, router: Object) -> Iterator[Tls | None]:
    """Yield TLS with the certificate in the secret next to the router's; None if the pod `router` speaks plain text.

    Raises CommandError if the secret can't be read.
    """
    volumes = router["spec"].get("volumes") or ()
    mounted = [each["secret"]["secretName"] for each in volumes if each["name"] == TLS_VOLUME and "secret" in each]
    if not mounted:
        yield None
        return
    name = f"{mounted[0].removesuffix(_OF_ROUTER)}-{ADMIN}"
    with asking(f"secret {namespace}/{name}, to call the router with"):
        data = client.CoreV1Api().read_namespaced_secret(name, namespace).data or {}
    with TemporaryDirectory() as folder:
        for key, value in data.items():
            (Path(folder) / key).write_bytes(base64.b64decode(value))
        try:
            tls = Tls(Path(folder))
        except CertificateError as error:
            raise CommandError(f"secret {namespace}/{name}: {error}") from error
        yield tls
