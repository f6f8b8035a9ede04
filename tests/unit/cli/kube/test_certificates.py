"""`ryzanstein kube ensure-certificates` makes secrets: made, kept, renewed, the CA replaced."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from services.cli.kube import certificates
from services.cli.main import app
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Certificate
from tests.kube_api import KubeApi

COMMAND = (
    *("kube", "ensure-certificates", "--prefix", "rz-tls", "--domain", "rz.llm", "--component", "gateway"),
    *("--component", "worker", "--label", "a=b", "--host", "worker=worker.example"),
)
DAY = 86_400.0


def ensure(*options: str) -> set[str]:
    """The components whose secrets were written, and `ca`."""
    done = CliRunner().invoke(app, [*COMMAND, *options])
    assert done.exit_code == 0, done.output
    written = {line.split()[1] for line in done.output.splitlines() if line.endswith(" written")}
    assert bool(written) != ("no certificate of llm/rz-tls has to be renewed" in done.output)
    return {name.removeprefix("llm/rz-tls-") for name in written}


def mounted(api: KubeApi, component: str, folder: Path) -> Certificate:
    """A component's secret as it reads it."""
    folder.mkdir(exist_ok=True)
    for key, value in api.objects["secrets", f"rz-tls-{component}"]["data"].items():
        (folder / key).write_bytes(base64.b64decode(value))
    return Certificate.read(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    real = certificates.time.time
    monkeypatch.setattr(certificates.time, "time", lambda: real() + now[0])
    return now


def authorities(certificate: Certificate) -> set[str]:
    return {each.subject.rfc4514_string() for each in x509.load_pem_x509_certificates(certificate.authorities)}


def issuer(certificate: Certificate) -> str:
    return x509.load_pem_x509_certificate(certificate.chain).issuer.rfc4514_string()


def hosts(certificate: Certificate) -> list[str]:
    leaf = x509.load_pem_x509_certificate(certificate.chain)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


def test_certificates_are_made_kept_and_renewed(api: KubeApi, tmp_path: Path, clock: list[float]) -> None:
    assert ensure() == {"ca", "gateway", "worker"}
    secret = api.objects["secrets", "rz-tls-gateway"]
    assert (secret["type"], secret["metadata"]["labels"], set(secret["data"])) == (
        "kubernetes.io/tls", {"a": "b"}, {CERTIFICATE, KEY, AUTHORITIES},
    )  # fmt: skip
    first = mounted(api, "gateway", tmp_path / "gateway")
    assert (first.identity.uri, first.identity.host) == ("spiffe://rz.llm/gateway", "gateway.rz.llm")
    assert hosts(first) == ["gateway.rz.llm"]
    assert ensure() == set()
    assert ensure("--host", "gateway=gateway.llm.svc") == {"gateway"}, "a name that it has not"
    assert hosts(mounted(api, "gateway", tmp_path / "named")) == ["gateway.rz.llm", "gateway.llm.svc"]
    assert ensure("--host", "gateway=gateway.llm.svc") == set()
    clock[0] = 61 * DAY  # validity: 90 days
    assert ensure() == {"gateway", "worker"}
    assert hosts(mounted(api, "worker", tmp_path / "worker")) == ["worker.rz.llm", "worker.example"]
    assert mounted(api, "gateway", tmp_path / "gateway").ends > first.ends + 60 * DAY


@pytest.mark.parametrize(("forced", "days"), [(True, 0), (False, 1300)])
def test_a_new_ca_is_trusted_before_issuing(
    api: KubeApi, tmp_path: Path, clock: list[float], forced: bool, days: int
) -> None:
    ensure()
    (old,) = authorities(before := mounted(api, "worker", tmp_path / "worker"))
    clock[0] = days * DAY
    ensure(*(["--new-authority"] if forced else []))
    trusting = mounted(api, "worker", tmp_path / "worker")
    (new,) = authorities(trusting) - {old}
    assert issuer(trusting) == issuer(before) == old
    assert ensure() == set()  # pods have not read it yet
    clock[0] += 601
    assert ensure() == {"ca", "gateway", "worker"}
    issuing = mounted(api, "worker", tmp_path / "worker")
    assert (issuer(issuing), authorities(issuing)) == (new, {old, new})
    clock[0] += 601
    ensure()
    alone = mounted(api, "worker", tmp_path / "worker")
    assert (issuer(alone), authorities(alone), alone.chain) == (new, {new}, issuing.chain)


def test_impossible_requests_are_named(api: KubeApi) -> None:
    def refused() -> str:
        done = CliRunner().invoke(app, COMMAND)
        assert done.exit_code == 1
        return done.output

    api.put("secrets", {"metadata": {"name": "rz-tls-ca"}, "data": {"other": ""}})
    assert "secret llm/rz-tls-ca is not a CA made here" in refused()
    del api.objects["secrets", "rz-tls-ca"]
    ensure()
    gateway = api.objects["secrets", "rz-tls-gateway"]
    gateway["data"] = {}
    api.before["PUT secrets"] = lambda: api.put("secrets", gateway)  # another run is faster
    assert "secret llm/rz-tls-gateway: Conflict (409)" in refused()
    api.refused["GET secrets"] = 403
    assert "secret llm/rz-tls-ca: Forbidden (403)" in refused()
    api.shutdown()
    api.server_close()
    assert "the API server does not answer" in refused()
