"""Makes and renews the certificates of an installation: secrets that its pods mount."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kubernetes import client

from services.cli.errors import CommandError
from services.cli.kube.cluster import asking, secret
from services.cli.kube.keyring import LEAF_LIFE, Keyring, last_third
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Identity
from services.common.tls.issuing import Issued


@dataclass(frozen=True, slots=True)
class CertificatePlan:
    """The components that have certificates, and their secrets: `prefix`-ca and `prefix`-COMPONENT."""

    namespace: str
    prefix: str
    domain: str  # RELEASE.NAMESPACE
    components: Sequence[str]
    labels: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)  # further DNS names, by component


def ensure(plan: CertificatePlan, *, replace_authority: bool = False) -> list[str]:
    """Make what is missing and renew what is in its last third; return the names of changed secrets.

    `replace_authority` begins the replacement of the CA, which the next runs finish. Raises CommandError if the API
    server refuses, or if another run changes the same secrets.
    """
    now, changed = time.time(), []
    secrets = _Secrets(plan)
    stored = secrets.read("ca")
    try:
        keyring = Keyring.from_data(stored) if stored else Keyring.new(now)
    except (KeyError, ValueError) as error:
        raise CommandError(f"secret {plan.namespace}/{plan.prefix}-ca is not a CA made here: {error!r}") from error
    if stored:
        keyring = keyring.advanced(now, replace_authority=replace_authority)
    changed += secrets.write("ca", keyring.to_data(), "Opaque")
    for component in plan.components:
        hosts = [plan.hosts[component]] if component in plan.hosts else []
        data = _renewed(secrets.read(component), keyring, Identity(plan.domain, component), hosts, now)
        changed += secrets.write(component, data, "kubernetes.io/tls")
    return changed


def _renewed(
    stored: Mapping[str, bytes], keyring: Keyring, identity: Identity, hosts: Sequence[str], now: float
) -> dict[str, bytes]:
    """The data of a component's secret, with a new certificate if the stored one must be replaced."""
    issued = Issued(stored.get(CERTIFICATE, b""), stored.get(KEY, b""))
    by = keyring.current
    if (
        not issued.certificate
        or issued.leaf.issuer != by.own.leaf.subject
        or last_third(issued, now)
        or not issued.hosts.issuperset(hosts)
    ):
        issued = by.issue(identity, LEAF_LIFE, now, hosts=hosts)
    return {CERTIFICATE: issued.certificate, KEY: issued.key, AUTHORITIES: keyring.trusted}


class _Secrets:
    """The plan's secrets. Each is written as it was read, so that two runs can't overwrite each other."""

    def __init__(self, plan: CertificatePlan) -> None:
        self._plan = plan
        self._read: dict[str, client.V1Secret] = {}

    def read(self, name: str) -> dict[str, bytes]:
        """The data of a secret, empty if there is none."""
        full = f"{self._plan.prefix}-{name}"
        stored = secret(self._plan.namespace, full)
        if stored is None:
            return {}
        self._read[name] = stored
        return {key: base64.b64decode(value) for key, value in (stored.data or {}).items()}

    def write(self, name: str, data: Mapping[str, bytes], kind: str) -> list[str]:
        """Create or replace a secret unless it holds `data`; return its name if it was written."""
        full, known = f"{self._plan.prefix}-{name}", self._read.get(name)
        encoded: dict[str, bytes | str] = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if known is not None and known.data == encoded:
            return []
        meta = known.metadata if known else client.V1ObjectMeta(name=full, labels=dict(self._plan.labels))
        wanted, api = client.V1Secret(metadata=meta, type=kind, data=encoded), client.CoreV1Api()
        with asking(f"secret {self._plan.namespace}/{full}"):
            if known is not None:
                api.replace_namespaced_secret(full, self._plan.namespace, wanted)
            else:
                api.create_namespaced_secret(self._plan.namespace, wanted)
        return [full]
