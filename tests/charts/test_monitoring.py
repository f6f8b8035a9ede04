"""monitoring.mode and tracing.mode: what each renders, and that rules and dashboards are this release's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import Object, Rendered, environment, render
from tests.programs import program
from tests.shell import captured

OPERATOR = "monitoring: {mode: operator, operator: {labels: {release: prometheus}}}"
WATCHERS = {"prometheus", "grafana", "jaeger"}


def _components(rendered: Rendered) -> set[str]:
    return {pod.component for pod in rendered.pods} & WATCHERS


def test_monitoring_modes_render_their_components() -> None:
    assert _components(render()) == WATCHERS
    assert _components(render(inline="monitoring: {mode: none}")) == {"jaeger"}
    assert _components(render(inline="monitoring: {grafana: {enabled: false}}\ntracing: {mode: none}")) == {
        "prometheus"
    }
    operator = render(inline=f"{OPERATOR}\ntracing: {{mode: otlp, endpoint: 'http://collector:4317'}}")
    assert _components(operator) == set()
    for kind in ("PodMonitor", "PrometheusRule"):
        (manifest,) = operator.of(kind)
        assert manifest["metadata"]["labels"]["release"] == "prometheus"
    dashboards = operator.named("ConfigMap", "ryzanstein-dashboards")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert not render().of("PodMonitor", "PrometheusRule")


def _bundled_rules(inline: str = "") -> list[Object]:
    return _rules(
        yaml.safe_load(render(inline=inline).named("ConfigMap", "ryzanstein-prometheus")["data"]["rules.yml"])
    )


def _rules(groups: dict[str, Any]) -> list[Object]:
    return [rule for group in groups["groups"] for rule in group["rules"]]


def test_both_modes_have_the_same_rules() -> None:
    (operator,) = render(inline=OPERATOR).of("PrometheusRule")
    assert _rules(operator["spec"]) == _bundled_rules()


def test_both_modes_label_series_alike() -> None:
    config = yaml.safe_load(render().named("ConfigMap", "ryzanstein-prometheus")["data"]["prometheus.yml"])
    (job,) = config["scrape_configs"]
    (monitor,) = render(inline=OPERATOR).of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    bundled = {step.get("target_label") for step in job["relabel_configs"]}
    operator = {step.get("targetLabel") for step in endpoint["relabelings"]}
    assert bundled == operator | {"namespace", "pod"}  # which the operator adds by itself
    assert {"instance", "component", "release", "ryzanstein_pool", "node"} <= operator


def test_monitor_selects_exactly_the_pods_with_metrics() -> None:
    rendered = render(inline=OPERATOR)
    (monitor,) = rendered.of("PodMonitor")
    selector, named = monitor["spec"]["selector"]["matchLabels"], monitor["spec"]["podMetricsEndpoints"][0]["port"]
    for pod in rendered.pods:
        ports = {port.get("name") for container in pod.containers for port in container.get("ports", ())}
        scraped = selector.items() <= pod.labels.items() and named in ports
        assert scraped == (pod.component in ("gateway", "router", "coordinator", "worker")), pod


def test_rules_select_their_release() -> None:
    rules = _bundled_rules()
    assert len(rules) > 40
    for rule in rules:
        assert 'job="ryzanstein"' not in rule["expr"]
        assert 'namespace="serving",release="ryzanstein"' in rule["expr"]


def test_objectives_overrides_and_labels_reach_the_rules() -> None:
    rules = _bundled_rules(
        "monitoring: {rules: {slo: {availability: 99.5, ttftSeconds: 1, ttftPercent: 95}, labels: {team: blue},"
        " runbookBase: 'https://wiki.example/', overrides: {RyzansteinRedisAway: {for: 15s, severity: page},"
        " RyzansteinAffinityLow: {enabled: false}}}}"
    )
    alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
    assert "> 14.4 * 0.005 and" in alerts["RyzansteinErrorBudgetBurn"]["expr"]
    assert "> 14.4 * 0.05 and" in alerts["RyzansteinFirstTokenSlow"]["expr"]
    assert any('le="1.0"' in rule["expr"] for rule in rules)
    assert not any('le="2.5"' in rule["expr"] for rule in rules)
    assert alerts["RyzansteinRedisAway"]["for"] == "15s"
    assert alerts["RyzansteinRedisAway"]["labels"] == {"severity": "page", "team": "blue"}
    assert alerts["RyzansteinRedisAway"]["annotations"]["runbook_url"] == "https://wiki.example/redis-lost.md"
    assert "RyzansteinAffinityLow" not in alerts
    dashboards = render(inline="monitoring: {rules: {slo: {availability: 99.5}}}").named(
        "ConfigMap", "ryzanstein-dashboards"
    )["data"]
    assert "/ 0.005" in dashboards["rz-overview.json"]


def test_alerts_on_absent_components_are_off() -> None:
    names = {rule.get("alert") for rule in _bundled_rules()}
    assert not names & {"RyzansteinPodPending", "RyzansteinGpuXid", "RyzansteinAutoscalerBlind"}
    on = _bundled_rules("monitoring: {rules: {kubernetes: true, gpu: true}}")
    assert {"RyzansteinPodPending", "RyzansteinGpuXid"} <= {rule.get("alert") for rule in on}
    pending = next(rule for rule in on if rule.get("alert") == "RyzansteinPodPending")
    assert 'namespace="serving",pod=~"ryzanstein-.*"' in pending["expr"]


@pytest.mark.parametrize("inline", ["", "monitoring: {rules: {kubernetes: true, gpu: true, slo: {ttftSeconds: 0.5}}}"])
def test_prometheus_takes_its_configuration(inline: str, tmp_path: Path) -> None:
    promtool = program("promtool")
    data = render(inline=inline).named("ConfigMap", "ryzanstein-prometheus")["data"]
    (tmp_path / "rules.yml").write_text(data["rules.yml"])
    (tmp_path / "prometheus.yml").write_text(data["prometheus.yml"].replace("/etc/prometheus", str(tmp_path)))
    done = captured([promtool, "check", "config", str(tmp_path / "prometheus.yml")])
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_every_dashboard_and_needs_no_password() -> None:
    rendered = render()
    data = rendered.named("ConfigMap", "ryzanstein-dashboards")["data"]
    assert {json.loads(text)["uid"] + ".json" for text in data.values()} == set(data)
    assert "rz-k8s.json" not in data, "it would be empty: nothing here knows of Kubernetes"
    assert "rz-k8s.json" in render(inline=OPERATOR).named("ConfigMap", "ryzanstein-dashboards")["data"]
    (grafana,) = rendered.pods_of("grafana")
    env = environment(grafana.containers[0])
    assert env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert env["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    sources = yaml.safe_load(rendered.named("ConfigMap", "ryzanstein-grafana")["data"]["sources.yaml"])
    services = {service["metadata"]["name"] for service in rendered.of("Service")}
    for source in sources["datasources"]:
        assert source["url"].split("//")[1].split(".")[0] in services
    (locked,) = render(inline="monitoring: {grafana: {adminSecret: {name: grafana}}}").pods_of("grafana")
    assert "GF_AUTH_ANONYMOUS_ENABLED" not in environment(locked.containers[0])


def test_every_service_sends_traces_where_the_mode_says() -> None:
    for inline, endpoint in (
        ("", "http://ryzanstein-jaeger.serving.svc.cluster.local:4317"),
        ("tracing: {mode: otlp, endpoint: 'http://collector:4317'}", "http://collector:4317"),
        ("tracing: {mode: none}", None),
    ):
        for pod in render(inline=inline).pods_of("gateway", "router", "coordinator", "worker"):
            assert environment(pod.containers[0]).get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint, pod


def test_prometheus_may_only_look_at_pods() -> None:
    role = render().named("Role", "ryzanstein-prometheus")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
