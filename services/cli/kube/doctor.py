"""`ryzanstein kube doctor`: prints the problems of an installation, and the commands that help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from services.cli.kube.diagnosis import diagnose
from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot


def report(snapshot: ClusterSnapshot, *, as_json: bool) -> bool:
    """Print the findings; return whether any problem exists now."""
    findings = diagnose(snapshot)
    if as_json:
        body = {"findings": [asdict(finding) for finding in findings], "unread": sorted(snapshot.unread)}
        print(json.dumps(body, indent=2))  # noqa: T201
    else:
        _print(Console(), snapshot, findings)
    return any(not finding.harmless for finding in findings)


def _print(console: Console, snapshot: ClusterSnapshot, findings: Sequence[Finding]) -> None:
    for finding in findings:
        colour = "yellow" if finding.harmless else "red"
        console.print(f"[{colour}]{finding.where}[/] is {finding.what}:", highlight=False, soft_wrap=True)
        console.print(f"  {finding.why}", highlight=False, markup=False, soft_wrap=True)
        for step in finding.do:
            console.print(f"    {step}", style="bold", highlight=False, markup=False, soft_wrap=True)
    if all(finding.harmless for finding in findings):
        pods = len(snapshot.own("pods"))
        console.print(f"{snapshot.namespace}/{snapshot.release} is well: {pods} pods", highlight=False)
    unread = sorted(snapshot.unread - {"podmonitors", "prometheuses", "httproutes"})
    if unread:
        console.print(f"not looked at, since it may not be read: {', '.join(unread)}", style="dim", highlight=False)
