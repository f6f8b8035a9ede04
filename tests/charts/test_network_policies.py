"""The policies let through exactly the connections that the product makes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.charts.network import CALLS, GRPC, HTTP, METRICS, WORKER, Edge, allowed, edges, policed, ports, rules
from tests.charts.rendering import NAMESPACE, Object, Pod, Rendered, environment, render

SERVICES = {"gateway", "router", "coordinator", "worker", "finetuner", "redis", "secrets"}
FETCHED = "workers: {pools: {default: {model: 'hf://org/name'}}}"


def test_only_services_reach_services(rendered: Rendered) -> None:
    present = {edge for edge in edges(rendered) if {edge.source, edge.target} <= SERVICES}
    if not rendered.of("NetworkPolicy"):
        return
    there = {pod.component for pod in rendered.pods}
    of_redis = {port for pod in rendered.pods if pod.component == "redis" for port in ports(pod)}
    called = {edge for edge in CALLS if edge.target != "redis"}
    called |= {Edge(edge.source, "redis", port) for edge in CALLS - called for port in of_redis}
    of_workers = {port for pod in rendered.pods_of("worker") for port in ports(pod) if port >= WORKER}
    called |= {Edge(edge.source, "worker", port) for edge in called if edge.target == "worker" for port in of_workers}
    assert present == {edge for edge in called if {edge.source, edge.target} <= there}


def test_the_defaults_are_policed() -> None:
    """The tests here would also hold of a chart without policies."""
    rendered = render()
    there = {edge for edge in CALLS if edge.source != "finetuner"}
    assert {edge for edge in edges(rendered) if {edge.source, edge.target} <= SERVICES} == there
    for pod in rendered.pods:
        for direction in ("ingress", "egress"):
            assert policed(rendered.of("NetworkPolicy"), pod, direction), f"{pod} {direction}"


def test_every_address_in_the_environment_can_be_called(rendered: Rendered) -> None:
    policies = rendered.of("NetworkPolicy")
    for pod, service, port in _addresses(rendered):
        targets = [target for target in rendered.pods if service["spec"]["selector"].items() <= target.labels.items()]
        assert targets, f"{pod} calls {service['metadata']['name']}, which selects no pod"
        for target in targets:
            assert allowed(policies, pod, target, _container_port(service, target, port)), f"{pod} -> {target}:{port}"


def test_services_are_called_by_address() -> None:
    """The test above would hold of an environment without addresses."""
    called = {(pod.component, service["metadata"]["name"]) for pod, service, _ in _addresses(render())}
    assert called >= {
        ("gateway", "ryzanstein-router"),
        ("router", "ryzanstein-coordinator"),
        ("worker", "ryzanstein-redis"),
    }


def _addresses(rendered: Rendered) -> Iterator[tuple[Pod, Object, int]]:
    """Each ``host:port`` in a variable or command whose host is a Service of the release, or a pod of one."""
    services = {service["metadata"]["name"]: service for service in rendered.of("Service")}
    for pod in rendered.pods:
        for container in pod.all_containers:
            texts = [*environment(container).values(), *container.get("command", ()), *container.get("args", ())]
            for host, port in re.findall(r"([a-z0-9][-.a-z0-9]*):(\d+)", " ".join(map(str, texts))):
                name = next((part for part in host.split(f".{NAMESPACE}.")[0].split(".") if part in services), None)
                if name:
                    yield pod, services[name], int(port)


def _container_port(service: Object, target: Pod, port: int) -> int:
    if service["spec"].get("clusterIP") == "None":
        return port
    (entry,) = [each for each in service["spec"]["ports"] if each["port"] == port]
    named = {
        each.get("name"): each["containerPort"]
        for container in target.containers
        for each in container.get("ports", ())
    }
    wanted = entry.get("targetPort", port)
    return int(named.get(wanted, wanted))


def test_every_pod_may_ask_for_names(rendered: Rendered) -> None:
    policies = rendered.of("NetworkPolicy")
    for pod in rendered.pods:
        if policed(policies, pod, "egress") and pod.component != "training":
            parameters = {
                port.get("protocol", "TCP")
                for rule in rules(policies, pod, "egress")
                for port in rule.get("ports", ())
                if port.get("port") in (53, 5353)  # OpenShift's
            }
            assert parameters == {"TCP", "UDP"}, pod


def test_only_the_gateway_is_open_to_clients() -> None:
    rendered = render()
    policies = rendered.of("NetworkPolicy")
    for pod in rendered.pods:
        opened = [rule for rule in rules(policies, pod, "ingress") if _is_foreign(rule, "from")]
        present = {port["port"] for rule in opened for port in rule["ports"]}
        named = {each["name"]: each["containerPort"] for c in pod.containers for each in c.get("ports", ())}
        assert {named.get(port, port) for port in present} == ({HTTP, GRPC} if pod.component == "gateway" else set()), (
            pod
        )


def test_clients_can_be_chosen() -> None:
    rendered = render(inline="networkPolicy: {clientsFrom: [{namespaceSelector: {matchLabels: {team: blue}}}]}")
    (gateway,) = rendered.pods_of("gateway")
    peers = [peer for rule in rules(rendered.of("NetworkPolicy"), gateway, "ingress") for peer in rule.get("from", ())]
    assert {"namespaceSelector": {"matchLabels": {"team": "blue"}}} in peers
    assert all(rule.get("from") for rule in rules(rendered.of("NetworkPolicy"), gateway, "ingress"))


def test_metrics_are_readable_from_configured_namespaces() -> None:
    rendered = render(inline="networkPolicy: {metricsFrom: [{namespaceSelector: {matchLabels: {team: red}}}]}")
    for pod in rendered.pods_of("gateway", "router", "coordinator", "worker"):
        present = [
            rule
            for rule in rules(rendered.of("NetworkPolicy"), pod, "ingress")
            if {"namespaceSelector": {"matchLabels": {"team": "red"}}} in rule.get("from", ())
        ]
        assert present, pod


def test_only_pools_that_fetch_reach_the_internet() -> None:
    def outside(values: str) -> list[Object]:
        rendered = render(inline=values)
        (worker,) = rendered.pods_of("worker")
        return [rule for rule in rules(rendered.of("NetworkPolicy"), worker, "egress") if _is_outside(rule)]

    assert outside("") == []
    (rule,) = outside(FETCHED)
    assert [port["port"] for port in rule["ports"]] == [443]


def test_gateways_reach_the_ports_of_configured_apis_outside() -> None:
    def outside(values: str) -> set[int]:
        rendered = render(inline=values)
        (gateway,) = rendered.pods_of("gateway")
        present = [rule for rule in rules(rendered.of("NetworkPolicy"), gateway, "egress") if _is_outside(rule)]
        return {port["port"] for rule in present for port in rule["ports"]}

    externals = "externals: {a: {baseUrl: 'https://api.example.org/v1'}, b: {baseUrl: 'http://10.0.0.1:8080/v1'}}"
    jwt = "{issuer: 'https://id.example.org:8443', audience: llm}"
    tenancy = f"gateway: {{tenancy: {{enabled: true, keysSecret: {{name: keys}}, jwt: {jwt}}}}}"
    assert outside("") == set()
    assert outside(externals) == {443, 8080}
    assert outside(tenancy) == {8443}
    assert outside("gateway: {settings: {imageHosts: ['*.example.org', 'example.com:4443']}}") == {443, 4443}
    peers = "{egressTo: [{ipBlock: {cidr: 203.0.113.0/24}}]}"
    rendered = render(inline=f"{externals}\ngateway: {peers}")
    (gateway,) = rendered.pods_of("gateway")
    present = [rule for rule in rules(rendered.of("NetworkPolicy"), gateway, "egress") if _is_outside(rule)]
    assert [rule["to"] for rule in present] == [[{"ipBlock": {"cidr": "203.0.113.0/24"}}]] * 2


def test_only_routers_the_secrets_job_and_prometheus_reach_the_api_server() -> None:
    rendered = render()
    reach = {
        pod.component
        for pod in rendered.pods
        if any(_is_outside(rule) for rule in rules(rendered.of("NetworkPolicy"), pod, "egress"))
    }
    assert reach == {"router", "secrets", "prometheus"}


def test_a_training_has_no_network() -> None:
    """It reads users' files with others' code, and needs no more than its volumes."""
    rendered = render(inline="finetuner: {enabled: true}")
    policies = rendered.of("NetworkPolicy")
    (training,) = rendered.pods_of("training")
    for direction in ("ingress", "egress"):
        assert policed(policies, training, direction)
        assert rules(policies, training, direction) == []


def test_monitoring_is_let_through() -> None:
    rendered = render()
    present = {edge for edge in edges(rendered) if {edge.source, edge.target} & {"prometheus", "grafana", "jaeger"}}
    services = ("gateway", "router", "coordinator", "worker")
    assert present == {
        *(Edge("prometheus", service, METRICS) for service in services),
        *(Edge(service, "jaeger", 4317) for service in services),
        Edge("grafana", "prometheus", 9090),
        Edge("grafana", "jaeger", 16686),
        Edge("test", "prometheus", 9090),
    }


def test_clients_of_monitoring_are_configurable() -> None:
    rendered = render(inline="monitoring: {clientsFrom: [{namespaceSelector: {matchLabels: {team: sre}}}]}")
    for component, port in (("prometheus", 9090), ("grafana", 3000), ("jaeger", 16686)):
        (pod,) = rendered.pods_of(component)
        (rule,) = [rule for rule in rules(rendered.of("NetworkPolicy"), pod, "ingress") if _is_foreign(rule, "from")]
        assert rule["ports"] == [{"protocol": "TCP", "port": port}]


def test_policies_can_be_off() -> None:
    assert render(inline="networkPolicy: {enabled: false}").of("NetworkPolicy") == []


def _is_foreign(rule: Object, peers: str) -> bool:
    """Whether it lets anything but pods of the own namespace through."""
    return not rule.get(peers) or any({"namespaceSelector", "ipBlock"} & peer.keys() for peer in rule[peers])


def _is_outside(rule: Object) -> bool:
    """Whether it lets connections leave the cluster's pods."""
    return not rule.get("to") or any("ipBlock" in peer for peer in rule["to"])
