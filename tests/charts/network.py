"""NetworkPolicies as an enforcer reads them: who may open a connection to whom."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli.kube.diagnosis.snapshot import selects
from tests.charts.rendering import Object, Pod, Rendered


@dataclass(frozen=True, order=True)
class Edge:
    """One component may connect to a port of another."""

    source: str
    target: str
    port: int


HTTP, GRPC, ROUTER, COORDINATOR, WORKER, METRICS, REDIS = 8000, 50051, 50052, 50053, 50054, 9100, 6380
# Addresses that the services call: addresses from the environment, and those that they learn from leases in Redis.
CALLS = {
    Edge("gateway", "router", ROUTER),
    Edge("gateway", "worker", WORKER),
    Edge("gateway", "redis", REDIS),
    Edge("router", "coordinator", COORDINATOR),
    Edge("router", "worker", WORKER),
    Edge("router", "router", ROUTER),
    Edge("router", "redis", REDIS),
    Edge("coordinator", "worker", WORKER),
    Edge("coordinator", "redis", REDIS),
    Edge("worker", "worker", WORKER),
    Edge("worker", "redis", REDIS),
    Edge("finetuner", "redis", REDIS),
}


def edges(rendered: Rendered) -> set[Edge]:
    """Every connection between pods of the release that both sides' policies let through."""
    policies = rendered.of("NetworkPolicy")
    return {
        Edge(source.component, target.component, port)
        for source in rendered.pods
        for target in rendered.pods
        for port in ports(target)
        if allowed(policies, source, target, port)
    }


def ports(pod: Pod) -> set[int]:
    return {port["containerPort"] for container in pod.containers for port in container.get("ports", ())}


def allowed(policies: list[Object], source: Pod, target: Pod, port: int) -> bool:
    """Whether the source's egress and the target's ingress rules both let a TCP connection through."""
    named = {
        each["name"]: each["containerPort"]
        for container in target.containers
        for each in container.get("ports", ())
        if "name" in each
    }
    return all(
        any(_matches(rule, peers, other.labels, port, named) for rule in rules(policies, pod, direction))
        for pod, other, direction, peers in ((source, target, "egress", "to"), (target, source, "ingress", "from"))
        if policed(policies, pod, direction)
    )


def policed(policies: list[Object], pod: Pod, direction: str) -> bool:
    """Whether some policy selects the pod: then everything that no rule names is refused."""
    return any(
        direction.capitalize() in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], pod.labels)
        for policy in policies
    )


def rules(policies: list[Object], pod: Pod, direction: str) -> list[Object]:
    """All rules of one direction that hold for a pod."""
    chosen = [policy["spec"] for policy in policies if selects(policy["spec"]["podSelector"], pod.labels)]
    return [rule for spec in chosen for rule in spec.get(direction) or ()]


def _matches(rule: Object, peers: str, labels: dict[str, str], port: int, named: dict[str, int]) -> bool:
    open_ports = rule.get("ports")
    if open_ports and not any(_port_matches(each, port, named) for each in open_ports):
        return False
    # An ipBlock is for addresses outside of the cluster; a namespaceSelector here never means our own namespace.
    return not rule.get(peers) or any(
        "ipBlock" not in peer
        and peer.get("namespaceSelector") in (None, {})
        and selects(peer.get("podSelector") or {}, labels)
        for peer in rule[peers]
    )


def _port_matches(entry: Object, port: int, named: dict[str, int]) -> bool:
    wanted = entry.get("port")
    first = named.get(wanted, wanted)
    return entry.get("protocol", "TCP") == "TCP" and (first is None or first <= port <= entry.get("endPort", first))
