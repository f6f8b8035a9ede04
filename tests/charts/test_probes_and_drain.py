"""Pods are asked where the answer is true, and are given the time that ending takes."""

from __future__ import annotations

import math

import pytest

from tests.charts.rendering import Object, Pod, Rendered, RenderError, environment, render

SERVICES = ("gateway", "router", "coordinator", "worker", "finetuner")
METRICS = 9100
# The time that /livez itself gives the event loop; a kubelet that gives up first would restart a busy pod.
LIVENESS_TIMEOUT_S = 5
# Closing servers, exporting the last spans.
MARGIN_S = 10


def _port(container: Object, probe: Object) -> int:
    port = probe.get("httpGet", probe.get("tcpSocket", {})).get("port")
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    return int(named.get(port, port))


def _services(rendered: Rendered) -> list[tuple[Pod, Object]]:
    return [(pod, pod.containers[0]) for pod in rendered.pods_of(*SERVICES)]


def test_every_container_has_three_probes(rendered: Rendered) -> None:
    for pod in rendered.pods:
        if not pod.runs_to_completion:
            for container in pod.containers:
                probes = {"startupProbe", "livenessProbe", "readinessProbe"}
                assert probes <= container.keys(), f"{pod} {container['name']}"


def test_one_container_in_a_service_pod(rendered: Rendered) -> None:
    for pod in rendered.pods_of(*SERVICES):
        assert len(pod.containers) == 1, pod


def test_liveness_asks_the_metrics_port(rendered: Rendered) -> None:
    """It is served by a thread of its own: load on the serving port kills no pod."""
    for pod, container in _services(rendered):
        probe = container["livenessProbe"]
        assert (_port(container, probe), probe["httpGet"]["path"]) == (METRICS, "/livez"), pod
        assert probe["timeoutSeconds"] > LIVENESS_TIMEOUT_S, pod
        assert probe["failureThreshold"] >= 3, pod


def test_readiness_probes_ask_readyz(rendered: Rendered) -> None:
    for pod, container in _services(rendered):
        probe = container["readinessProbe"]
        expected = 8000 if pod.component == "gateway" else METRICS
        assert (_port(container, probe), probe["httpGet"]["path"]) == (expected, "/readyz"), pod


def test_a_worker_has_its_whole_budget_to_load() -> None:
    for budget in (180, 1801):
        values = f"workers: {{pools: {{default: {{startupBudgetSeconds: {budget}}}}}}}"
        ((pod, container),) = [pair for pair in _services(render(inline=values)) if pair[0].component == "worker"]
        probe = container["startupProbe"]
        assert probe["httpGet"]["path"] == "/readyz", pod
        assert budget <= probe["periodSeconds"] * probe["failureThreshold"] < budget + probe["periodSeconds"] + 1


def test_the_grace_covers_the_drain(rendered: Rendered) -> None:
    for pod, container in _services(rendered):
        env = environment(container)
        names = ("RYZANSTEIN_DRAIN_DELAY_S", "RYZANSTEIN_DRAIN_TIMEOUT_S", "RYZANSTEIN_DRAIN_S")
        drain = sum(float(env.get(name, 0)) for name in names) + _pre_stop(container)
        assert pod.spec["terminationGracePeriodSeconds"] >= math.ceil(drain) + MARGIN_S, pod


def _pre_stop(container: Object) -> float:
    hook = container.get("lifecycle", {}).get("preStop", {})
    return float(hook.get("sleep", {}).get("seconds", 0) or hook.get("exec", {}).get("command", ["", "0"])[-1])


def test_both_kinds_of_drain_are_rendered() -> None:
    """The test above would hold of a chart that drains nothing."""
    env = {pod.component: environment(container) for pod, container in _services(render())}
    assert float(env["gateway"]["RYZANSTEIN_DRAIN_DELAY_S"]) >= 5
    assert float(env["gateway"]["RYZANSTEIN_DRAIN_SILENCE_S"]) > 0
    assert float(env["gateway"]["RYZANSTEIN_DRAIN_TIMEOUT_S"]) >= 60
    assert float(env["worker"]["RYZANSTEIN_DRAIN_S"]) > 0


def test_longer_streams_get_a_longer_grace() -> None:
    def grace(values: str) -> int:
        (pod,) = render(inline=values).pods_of("gateway")
        return int(pod.spec["terminationGracePeriodSeconds"])

    assert grace("gateway: {drain: {streamSeconds: 600}}") - grace("gateway: {drain: {streamSeconds: 120}}") == 480


def test_a_drain_beyond_the_grace_is_refused() -> None:
    """Set behind the chart's back, it would end in SIGKILL in the middle of streams."""
    gateway = "gateway: {env: {RYZANSTEIN_DRAIN_DELAY_S: '600'}, settings: {drainTimeoutS: 600}}"
    pool = "workers: {pools: {default: {env: {RYZANSTEIN_DRAIN_S: '60'}}}}"
    with pytest.raises(RenderError) as refused:
        render(inline=f"{gateway}\n{pool}")
    for where, name in (("gateway", "DELAY_S"), ("gateway", "TIMEOUT_S"), ("workers.pools.default", "S")):
        assert f"{where} sets RYZANSTEIN_DRAIN_{name}: " in str(refused.value)


def test_a_gateway_rollout_starts_new_pods_before_removing_pods() -> None:
    for deployment in render().of("Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway":
            assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
            return
    raise AssertionError("no Deployment of gateways")


def test_sets_start_and_end_their_pods_together(rendered: Rendered) -> None:
    """OrderedReady would wait for a broken pod 0 for ever, also with its repair."""
    assert {manifest["spec"].get("podManagementPolicy") for manifest in rendered.of("StatefulSet")} <= {"Parallel"}
