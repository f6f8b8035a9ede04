"""`ryzanstein kube ensure-certificates` against an API that keeps secrets: made, kept, renewed, the CA replaced."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from kubernetes import client

from services.cli.errors import CommandError
from services.cli.kube import certificates
from services.cli.kube.certificates import CertificatePlan
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Certificate

PLAN = CertificatePlan("llm", "rz-tls", "rz.llm", ("gateway", "worker"), {"a": "b"}, {"worker": "worker.example"})
DAY = 86_400.0


class Secrets:
    """What the API server does with secrets: it refuses to overwrite what was changed since it was read."""

    def __init__(self) -> None:
        self.kept: dict[str, client.V1Secret] = {}
        self.conflicts = False

    def read_namespaced_secret(self, name: str, _: str) -> client.V1Secret:
        if name not in self.kept:
            raise client.ApiException(status=404, reason="Not Found")
        return copy.deepcopy(self.kept[name])

    def create_namespaced_secret(self, _: str, secret: client.V1Secret) -> None:
        self._keep(secret.metadata.name, secret, "")

    def replace_namespaced_secret(self, name: str, _: str, secret: client.V1Secret) -> None:
        self._keep(name, secret, self.kept[name].metadata.resource_version)

    def _keep(self, name: str, secret: client.V1Secret, expected: str) -> None:
        if self.conflicts or (secret.metadata.resource_version or "") != expected:
            raise client.ApiException(status=409, reason="Conflict")
        secret.metadata.resource_version = expected + "1"
        self.kept[name] = secret

    def mounted(self, component: str, folder: Path) -> Certificate:
        """What a component reads."""
        folder.mkdir(exist_ok=True)
        for key, value in self.kept[f"rz-tls-{component}"].data.items():
            (folder / key).write_bytes(base64.b64decode(value))
        return Certificate.read(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    real = certificates.time.time
    monkeypatch.setattr(certificates.time, "time", lambda: real() + now[0])
    return now


def ensure(api: Secrets, **options: Any) -> set[str]:
    return {name.removeprefix("rz-tls-") for name in certificates.ensure(api, PLAN, **options)}  # type: ignore[arg-type]


def authorities(certificate: Certificate) -> set[str]:
    return {each.subject.rfc4514_string() for each in x509.load_pem_x509_certificates(certificate.authorities)}


def issuer(certificate: Certificate) -> str:
    return x509.load_pem_x509_certificate(certificate.chain).issuer.rfc4514_string()


def hosts(certificate: Certificate) -> list[str]:
    leaf = x509.load_pem_x509_certificate(certificate.chain)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


def test_certificates_are_made_kept_and_renewed(tmp_path: Path, clock: list[float]) -> None:
    api = Secrets()
    assert ensure(api) == {"ca", "gateway", "worker"}
    secret = api.kept["rz-tls-gateway"]
    assert (secret.type, secret.metadata.labels, set(secret.data)) == (
        "kubernetes.io/tls", {"a": "b"}, {CERTIFICATE, KEY, AUTHORITIES},
    )  # fmt: skip
    first = api.mounted("gateway", tmp_path / "gateway")
    assert (first.identity.uri, first.identity.host) == ("spiffe://rz.llm/gateway", "gateway.rz.llm")
    assert hosts(first) == ["gateway.rz.llm"]
    assert ensure(api) == set()
    clock[0] = 61 * DAY  # of 90
    assert ensure(api) == {"gateway", "worker"}
    assert hosts(api.mounted("worker", tmp_path / "worker")) == ["worker.rz.llm", "worker.example"]
    assert api.mounted("gateway", tmp_path / "gateway").ends > first.ends + 60 * DAY


@pytest.mark.parametrize(("asked", "days"), [(True, 0), (False, 1300)])
def test_a_new_ca_is_trusted_before_it_issues(tmp_path: Path, clock: list[float], asked: bool, days: int) -> None:
    api = Secrets()
    ensure(api)
    (old,) = authorities(before := api.mounted("worker", tmp_path / "worker"))
    clock[0] = days * DAY
    ensure(api, replace_authority=asked)
    trusting = api.mounted("worker", tmp_path / "worker")
    (new,) = authorities(trusting) - {old}
    assert issuer(trusting) == issuer(before) == old
    assert ensure(api) == set()  # pods have not read it yet
    clock[0] += 601
    assert ensure(api) == {"ca", "gateway", "worker"}
    issuing = api.mounted("worker", tmp_path / "worker")
    assert (issuer(issuing), authorities(issuing)) == (new, {old, new})
    clock[0] += 601
    ensure(api)
    alone = api.mounted("worker", tmp_path / "worker")
    assert (issuer(alone), authorities(alone), alone.chain) == (new, {new}, issuing.chain)


def test_what_it_can_not_do_is_named() -> None:
    api = Secrets()
    api.kept["rz-tls-ca"] = client.V1Secret(metadata=client.V1ObjectMeta(name="rz-tls-ca"), data={"other": ""})
    with pytest.raises(CommandError, match="secret llm/rz-tls-ca is not a CA made here"):
        ensure(api)
    api = Secrets()
    ensure(api)
    api.kept["rz-tls-gateway"].data = {}
    api.conflicts = True
    with pytest.raises(CommandError, match="secret llm/rz-tls-gateway: Conflict"):
        ensure(api)
