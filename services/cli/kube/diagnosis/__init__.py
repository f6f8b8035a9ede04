"""Diagnoses an installation: pure functions from the objects of the API server to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.cli.kube.diagnosis import certificates, exposure, pods, scraping, workloads
from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot

_CHECKS: tuple[Callable[[ClusterSnapshot], Iterator[Finding]], ...] = (
    workloads.findings,
    pods.findings,
    exposure.findings,
    scraping.findings,
    certificates.findings,
)


def diagnose(snapshot: ClusterSnapshot) -> list[Finding]:
    """All findings, each cause once."""
    findings = dict.fromkeys(finding for check in _CHECKS for finding in check(snapshot))
    return list(findings)
