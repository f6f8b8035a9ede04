"""The number of pods, its owner, and the number that may be away."""

from __future__ import annotations

import pytest

from tests.charts.rendering import Object, Rendered, render

SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
COMPONENTS = {
    "gateway": "gateway: {%s}",
    "router": "router: {%s}",
    "worker": "workers: {pools: {default: {%s}}}",
}

AUTOSCALED = ("gateway", "worker")


def _every(fields: str) -> str:
    return "\n".join(values % fields for values in COMPONENTS.values())


def _workload(rendered: Rendered, component: str) -> Object:
    (pod,) = rendered.pods_of(component)
    return pod.owner


def _budgets(rendered: Rendered, component: str) -> list[Object]:
    budgets = rendered.of("PodDisruptionBudget")
    return [each for each in budgets if each["metadata"]["labels"]["app.kubernetes.io/component"] == component]


def test_a_disruption_budget_needs_a_second_replica() -> None:
    """With one replica it would only block `kubectl drain`."""
    one, two = (render(inline=_every(f"replicas: {count}")) for count in (1, 2))
    for component in COMPONENTS:
        assert _budgets(one, component) == []
        (budget,) = _budgets(two, component)
        assert budget["spec"]["maxUnavailable"] == 1
        workload = _workload(two, component)["spec"]
        assert workload["replicas"] == 2
        assert budget["spec"]["selector"]["matchLabels"] == workload["selector"]["matchLabels"]


def test_no_budget_blocks_a_drain(rendered: Rendered) -> None:
    for budget in rendered.of("PodDisruptionBudget"):
        assert budget["spec"].get("maxUnavailable", 0) not in (0, "0%"), budget["metadata"]["name"]
        assert "minAvailable" not in budget["spec"], budget["metadata"]["name"]


def test_replicas_can_be_left_to_an_autoscaler() -> None:
    rendered = render(inline="\n".join(COMPONENTS[each] % "replicas: 2, replicasManaged: false" for each in AUTOSCALED))
    for component in AUTOSCALED:
        assert "replicas" not in _workload(rendered, component)["spec"]
        assert len(_budgets(rendered, component)) == 1


@pytest.mark.parametrize(
    ("components", "mode", "kind"),
    [
        (["gateway", "worker"], "hpa-cpu", "HorizontalPodAutoscaler"),
        (["gateway", "worker"], "keda", "ScaledObject"),
    ],
)
def test_an_autoscaler_decides_alone(components: list[str], mode: str, kind: str) -> None:
    values = [COMPONENTS[each] % f"autoscaling: {{mode: {mode}, min: 2, max: 5}}" for each in components]
    rendered = render(inline="\n".join(values))
    scalers = rendered.of(*SCALERS)
    assert {scaler["kind"] for scaler in scalers} == {kind}
    targets = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers}
    workloads = [_workload(rendered, component) for component in components]
    assert targets == {workload["metadata"]["name"] for workload in workloads}
    assert not [workload for workload in workloads if "replicas" in workload["spec"]]
    for scaler in scalers:
        keys = ("minReplicas", "maxReplicas", "minReplicaCount", "maxReplicaCount")
        assert {scaler["spec"].get(key) for key in keys} == {2, 5, None}


@pytest.mark.parametrize(
    ("inline", "address"),
    [
        (
            "keda: {source: prometheus}",
            "http://ryzanstein-prometheus.serving.svc.cluster.local:9090",
        ),
        ("keda: {prometheusUrl: 'http://theirs:9090'}", "http://theirs:9090"),
    ],
)
def test_keda_queries_a_reachable_prometheus(inline: str, address: str) -> None:
    """The bundled one unless another is named; only then do the policies let its operator in."""
    values = "gateway: {autoscaling: {mode: keda}}, workers: {defaults: {autoscaling: {mode: keda}}}"
    rendered = render(inline=f"{{{values}, {inline}}}")
    triggers = [trigger for scaler in rendered.of("ScaledObject") for trigger in scaler["spec"]["triggers"]]
    assert {trigger["metadata"]["serverAddress"] for trigger in triggers} == {address}
    policy = rendered.named("NetworkPolicy", "ryzanstein-prometheus")
    let_in = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"] if "namespaceSelector" in peer]
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert let_in == ([] if "theirs" in inline else [keda])


def test_keda_asks_routers_for_pools_of_workers() -> None:
    """No Prometheus is needed, and the policies let its operator in."""
    values = "workers: {defaults: {autoscaling: {mode: keda, min: 0}}}, monitoring: {mode: none}"
    rendered = render(inline=f"{{{values}}}")
    (scaler,) = rendered.of("ScaledObject")
    address = "ryzanstein-router.serving.svc.cluster.local:50052"
    (trigger,) = scaler["spec"]["triggers"]
    assert (trigger["type"], trigger["metadata"]) == ("external-push", {"scalerAddress": address, "pool": "default"})
    policy = rendered.named("NetworkPolicy", "ryzanstein-router")
    let_in = [rule for rule in policy["spec"]["ingress"] if any("namespaceSelector" in peer for peer in rule["from"])]
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert let_in == [{"ports": [{"protocol": "TCP", "port": 50052}], "from": [keda]}]


def test_pool_of_mode_builtin_has_its_replicas_from_routers_alone() -> None:
    rendered = render(inline="workers: {pools: {default: {replicas: 3, autoscaling: {mode: builtin}}}}")
    assert "replicas" not in _workload(rendered, "worker")["spec"]
    assert not rendered.of(*SCALERS)


def test_workers_with_pods_of_two_revisions_are_replaced_in_turn(rendered: Rendered) -> None:
    for pod in rendered.pods_of("worker", "router"):
        assert pod.owner["spec"].get("updateStrategy", {"type": "RollingUpdate"})["type"] == "RollingUpdate", pod


def test_pods_spread_over_nodes() -> None:
    rendered = render(inline="{gateway: {replicas: 2}, router: {replicas: 2}, workers: {defaults: {replicas: 2}}}")
    for pod in rendered.pods_of("gateway", "router", "worker"):
        (constraint,) = pod.spec["topologySpreadConstraints"]
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", pod
        assert constraint["labelSelector"]["matchLabels"].items() <= pod.labels.items(), pod


def test_pods_of_an_old_revision_do_not_count_for_the_spread_of_new_pods(rendered: Rendered) -> None:
    """A Deployment's old pods go last, and after them the new ones would be where the old were not: on one node."""
    for pod in rendered.pods:
        constraints = pod.spec.get("topologySpreadConstraints", ())
        keys = ["pod-template-hash"] if pod.owner["kind"] == "Deployment" else None
        assert [constraint.get("matchLabelKeys") for constraint in constraints] == [keys] * len(constraints), pod
