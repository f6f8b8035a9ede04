"""Finds reasons why no Prometheus can scrape the metrics, as far as objects of the API server show."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import COMPONENT, ClusterSnapshot, Object, labels, name, selects

_METRICS = 9100
_LET_IN = (
    '--set-json \'networkPolicy.metricsFrom=[{"namespaceSelector":{"matchLabels":'
    '{"kubernetes.io/metadata.name":"NAMESPACE-OF-PROMETHEUS"}}}]\''
)
_SERVICES = ("gateway", "router", "coordinator", "worker")


def findings(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """A PodMonitor that no Prometheus selects; a NetworkPolicy that blocks the metrics port."""
    monitors = snapshot.own("podmonitors")
    for monitor in monitors:
        yield from _not_taken(snapshot, monitor)
    if monitors or not snapshot.own("pods", "prometheus"):
        yield from _not_let_through(snapshot)


def _not_taken(snapshot: ClusterSnapshot, monitor: Object) -> Iterator[Finding]:
    where, servers = f"podmonitor/{name(monitor)}", snapshot.all("prometheuses")
    if "prometheuses" in snapshot.unread:
        return
    if not servers:
        why = "the cluster has the operator's kinds and no Prometheus of it"
        do = (snapshot.upgrade("--set monitoring.mode=bundled"),)
        yield Finding(where, "unscraped", why, do)
    elif not any(selects(server["spec"].get("podMonitorSelector"), labels(monitor)) for server in servers):
        wanted = [(server["spec"].get("podMonitorSelector") or {}).get("matchLabels", {}) for server in servers]
        label, value = next(((key, text) for labels_ in wanted for key, text in labels_.items()), ("LABEL", "VALUE"))
        why = f"no Prometheus selects its labels; they select {', '.join(map(str, wanted))}"
        do = (snapshot.upgrade(f"--set monitoring.operator.labels.{label}={value}"),)
        yield Finding(where, "unscraped", why, do)


def _not_let_through(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Services whose metrics port no NetworkPolicy rule opens."""
    for component in _SERVICES:
        for pod in snapshot.own("pods", component)[:1]:
            policies = [
                policy["spec"]
                for policy in snapshot.all("networkpolicies")
                if selects(policy["spec"].get("podSelector") or {}, labels(pod))
                and "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
            ]
            if policies and not any(_opens(rule) for policy in policies for rule in policy.get("ingress") or ()):
                why = f"NetworkPolicies let no pod at port {_METRICS} of {labels(pod)[COMPONENT]} pods"
                do = (snapshot.upgrade(_LET_IN), snapshot.upgrade("--set monitoring.mode=bundled"))
                yield Finding(f"networkpolicy of {component}", "unscraped", why, do)


def _opens(rule: Object) -> bool:
    ports = rule.get("ports")
    return not ports or any(port.get("port") in (None, _METRICS, "metrics") for port in ports)
