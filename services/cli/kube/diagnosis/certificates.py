"""Finds certificates of mutual TLS that have ended or end soon."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from cryptography import x509

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot, Object, name

_DAY_S = 86_400.0
_SOON_S = 7 * _DAY_S  # as the alert RyzansteinCertificateEnds
_CERTIFICATE = "tls.crt"


def findings(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Findings about the certificates that the release's pods have mounted."""
    renewals = [name(each) for each in snapshot.own("cronjobs") if name(each).endswith("-renewal")]
    do = [snapshot.kubectl("get jobs,cronjobs")]
    do += [snapshot.kubectl(f"create job --from=cronjob/{renewal} {renewal}-now") for renewal in renewals]
    do += [] if renewals else ["renew the secret by whatever has made it: nothing of this chart does"]
    for secret, ends in ends_of(snapshot.all("certificates")).items():
        left_s = ends - snapshot.now
        if left_s > _SOON_S:
            continue
        what = "a certificate that ends soon" if left_s > 0 else "a certificate that has ended"
        when = f"it ends in {left_s / _DAY_S:.1f} days" if left_s > 0 else f"it ended {-left_s / _DAY_S:.1f} days ago"
        yield Finding(f"secret/{secret}", what, f"{when}; then services refuse each other's new connections", tuple(do))


def ends_of(secrets: list[Object]) -> dict[str, float]:
    """When the certificate in each secret ends, seconds since the epoch. What is no certificate is left out."""
    ends = {}
    for secret in secrets:
        try:
            leaf = x509.load_pem_x509_certificate(base64.b64decode(secret["data"][_CERTIFICATE]))
        except (KeyError, ValueError):  # the pods that mount it name what is wrong
            continue
        ends[name(secret)] = leaf.not_valid_after_utc.timestamp()
    return ends
