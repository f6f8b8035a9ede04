"""`ryzanstein kube doctor` names the cause of what is wrong, and a command that mends it."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import timedelta
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.kube.diagnosis import diagnose
from services.cli.kube.diagnosis.snapshot import Object
from services.cli.kube.doctor import report
from services.cli.main import app
from services.common.tls.certificate import Identity
from services.common.tls.issuing import Authority
from tests.kube_api import KubeApi
from tests.unit.cli.kube.objects import BrokenInstallation, healthy, labels, one, pod, snapshot


def test_a_healthy_release_has_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(snapshot(healthy())) == []
    assert not report(snapshot(healthy()), as_json=False)
    assert "is well: 6 pods" in capsys.readouterr().out


def test_findings_are_for_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    broken = BrokenInstallation()
    broken.pending("worker", "0/1 nodes are available: 1 Insufficient memory.")
    assert report(broken.snapshot, as_json=True)
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["where"] == "pod/ryzanstein-workers-default-0"


def test_a_missing_release_names_the_installed_releases() -> None:
    objects = healthy()
    for each in objects["pods"]:
        each["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"
    objects["services"] = objects["networkpolicies"] = []
    (finding,) = diagnose(snapshot(objects))
    assert "releases here: other" in finding.why


def test_a_rollout_that_waits_for_a_pod_of_the_old_template() -> None:
    broken = BrokenInstallation()
    worker = broken.not_ready("worker")
    worker["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "ryzanstein-workers-default"}]
    worker["metadata"]["labels"]["controller-revision-hash"] = "ryzanstein-workers-default-old"
    broken.objects["statefulsets"] = [
        {
            "metadata": {"name": "ryzanstein-workers-default", "labels": labels("worker")},
            "spec": {"replicas": 1},
            "status": {"replicas": 1, "currentRevision": "a-old", "updateRevision": "ryzanstein-workers-default-new"},
        }
    ]
    steps = [step for each in diagnose(broken.snapshot) for step in each.do]
    assert "kubectl -n serving delete pod ryzanstein-workers-default-0" in steps


def test_a_policy_that_lets_no_prometheus_in() -> None:
    broken = BrokenInstallation()
    broken.objects["pods"].remove(broken.pod("prometheus"))
    broken.objects["networkpolicies"][0]["spec"]["ingress"] = [{"ports": [{"port": 8000}]}]
    findings = diagnose(broken.snapshot)
    assert {each.what for each in findings} == {"unscraped"}
    assert len(findings) == 4
    assert any("networkPolicy.metricsFrom" in step for step in findings[0].do)


def test_a_monitor_that_no_prometheus_selects() -> None:
    broken = BrokenInstallation()
    broken.objects["podmonitors"] = [{"metadata": {"name": "ryzanstein", "labels": labels("monitoring")}}]
    broken.objects["prometheuses"] = [
        {
            "metadata": {"name": "k"},
            "spec": {"podMonitorSelector": {"matchLabels": {"release": "kube-prometheus-stack"}}},
        }
    ]
    finding = one(broken)
    assert finding.what == "unscraped"
    assert "monitoring.operator.labels.release=kube-prometheus-stack" in finding.do[0]
    broken.objects["podmonitors"][0]["metadata"]["labels"]["release"] = "kube-prometheus-stack"
    assert diagnose(broken.snapshot) == []


def test_a_monitor_without_a_prometheus() -> None:
    broken = BrokenInstallation()
    broken.objects["podmonitors"] = [{"metadata": {"name": "ryzanstein", "labels": labels("monitoring")}}]
    finding = one(broken)
    assert (finding.where, finding.what) == ("podmonitor/ryzanstein", "unscraped")
    assert "monitoring.mode=bundled" in finding.do[0]
    assert diagnose(snapshot(broken.objects, "prometheuses")) == []


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        (None, False),
        ({}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["llm"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["llm"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"team": "llm"}, "matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_a_selector_selects_as_in_kubernetes(selector: Object | None, selected: bool) -> None:
    broken = BrokenInstallation()
    meta = {"name": "ryzanstein", "labels": labels("monitoring", team="llm")}
    broken.objects["podmonitors"] = [{"metadata": meta}]
    broken.objects["prometheuses"] = [{"metadata": {"name": "k"}, "spec": {"podMonitorSelector": selector}}]
    assert bool(diagnose(broken.snapshot)) is not selected


def service(**spec: Any) -> Object:
    return {"metadata": {"name": "s", "labels": labels("gateway")}, "spec": {"selector": labels("gateway")} | spec}


def ingress(wanted: str | None) -> Object:
    return {"metadata": {"name": "i", "labels": labels("gateway")}, "spec": {"ingressClassName": wanted}}


def reached(wanted: str | None) -> Object:
    """An Ingress with an address."""
    made = ingress(wanted) | {"status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}}
    return made | {"metadata": {"name": "other", "namespace": "elsewhere"}}


def route(*conditions: tuple[str, str]) -> Object:
    listed = [{"type": kind, "status": status, "reason": "NotAllowed"} for kind, status in conditions]
    parents = [{"parentRef": {"name": "public"}, "conditions": listed}] if listed else []
    return {"metadata": {"name": "r", "labels": labels("gateway")}, "status": {"parents": parents}}


NGINX: Object = {"metadata": {"name": "nginx"}}
DEFAULT: Object = {"metadata": {"name": "a", "annotations": {"ingressclass.kubernetes.io/is-default-class": "true"}}}


@pytest.mark.parametrize(
    ("objects", "where", "why"),
    [
        ({"services": [service(type="LoadBalancer")]}, "service/s", "its load balancer has no address"),
        ({"services": [service(selector={"a": "b"})]}, "service/s", "no pod has the labels that it selects"),
        ({"ingresses": [ingress("x")], "ingressclasses": [NGINX]}, "ingress/i", "no IngressClass x; there are: nginx"),
        ({"ingresses": [ingress(None)]}, "ingress/i", "the cluster has no default one; there are: none"),
        (
            {"ingresses": [ingress(None)], "ingressclasses": [DEFAULT], "ingresses anywhere": [reached(None)]},
            "ingress/i",
            "has given it no address, but one to other",
        ),
        (
            {"ingresses": [ingress("nginx")], "ingressclasses": [NGINX], "ingresses anywhere": [reached("nginx")]},
            "ingress/i",
            "has given it no address, but one to other",
        ),
        ({"httproutes": [route()]}, "httproute/r", "no Gateway has taken it"),
        ({"httproutes": [route(("Accepted", "False"))]}, "httproute/r", "public does not accept it: NotAllowed"),
        ({"httproutes": [route(("Accepted", "True"), ("Programmed", "False"))]}, "", ""),
    ],
)
def test_ways_in_that_lead_nowhere(objects: dict[str, list[Object]], where: str, why: str) -> None:
    broken = BrokenInstallation()
    broken.objects |= objects
    findings = diagnose(broken.snapshot)
    assert [each.where for each in findings] == [where] * bool(where)
    assert all(why in each.why for each in findings)


@pytest.mark.parametrize("others", [[], [reached("other")], [ingress("nginx")]])
def test_ingress_without_an_address_is_no_failure_when_its_controller_gives_no_address(
    others: list[Object], capsys: pytest.CaptureFixture[str]
) -> None:
    """As behind a NodePort or hostPort, where it may well answer."""
    broken = BrokenInstallation()
    broken.objects |= {"ingresses": [ingress("nginx")], "ingressclasses": [NGINX], "ingresses anywhere": others}
    finding = one(broken)
    assert (finding.where, finding.what) == ("ingress/i", "without an address")
    assert "NodePort or hostPort" in finding.why
    assert not report(broken.snapshot, as_json=False)
    assert "is well: 6 pods" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("component", "replicas", "what"),
    [("worker", 0, "without pods"), ("worker", 1, "unreachable"), ("gateway", 0, "unreachable")],
)
def test_a_pool_that_is_scaled_to_zero_is_no_failure(component: str, replicas: int, what: str) -> None:
    broken = BrokenInstallation()
    selector = labels(component) | {"ryzanstein.dev/pool": "night"}
    meta = {"name": "s", "labels": selector}
    broken.objects["services"] = [{"metadata": meta, "spec": {"selector": selector}}]
    made = {"metadata": meta, "spec": {"replicas": replicas, "template": {}}, "status": {"replicas": replicas}}
    broken.objects["statefulsets"] = [*broken.objects.get("statefulsets", []), made]
    (finding,) = diagnose(broken.snapshot)
    assert (finding.where, finding.what, finding.harmless) == ("service/s", what, what == "without pods")


def test_the_job_that_makes_the_secrets_has_failed() -> None:
    broken = BrokenInstallation()
    failed = {"conditions": [{"type": "Failed", "status": "True"}], "failed": 10}
    broken.objects["jobs"] = [
        {"metadata": {"name": "ryzanstein-secrets-1", "labels": labels("secrets")}, "spec": {}, "status": failed},
        {
            "metadata": {"name": "ryzanstein-secrets-2", "labels": labels("secrets")},
            "spec": {"completions": 1},
            "status": {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1},
        },
    ]
    finding = one(broken)
    assert (finding.where, finding.what) == ("job/ryzanstein-secrets-1", "failed")
    assert finding.do[0] == "kubectl -n serving logs job/ryzanstein-secrets-1"


@pytest.mark.parametrize(
    ("reason", "message", "do"),
    [
        ("FailedGetResourceMetric", "unable to get resource metric cpu", "kubectl top pods"),
        ("FailedGetExternalMetric", "unable to fetch metrics from keda", "see keda.prometheusUrl"),
        ("ScalingDisabled", "scaling is disabled since the replica count is zero", ""),
    ],
)
def test_an_autoscaler_that_sees_no_metric(reason: str, message: str, do: str) -> None:
    broken = BrokenInstallation()
    blind = {"type": "ScalingActive", "status": "False", "reason": reason, "message": message}
    able = {"type": "AbleToScale", "status": "True"}
    broken.objects["horizontalpodautoscalers"] = [
        {"metadata": {"name": "workers", "labels": labels("worker")}, "status": {"conditions": [able, blind]}}
    ]
    findings = diagnose(broken.snapshot)
    assert [(each.where, each.what, each.why, each.do[-1]) for each in findings] == (
        [("hpa/workers", "not scaling", message, do)] if do else []
    )


def test_terminating_and_completed_pods_are_healthy() -> None:
    broken = BrokenInstallation()
    broken.not_ready("gateway")["metadata"]["deletionTimestamp"] = "2026-11-25T10:00:00Z"
    broken.objects["pods"].append(pod("ryzanstein-gateway-6d5f-new", "gateway"))
    job = pod("ryzanstein-secrets-1", "secrets")
    job["status"] = {"phase": "Succeeded"}
    broken.objects["pods"].append(job)
    assert diagnose(broken.snapshot) == []


@pytest.mark.parametrize(("days", "what"), [(-1, "a certificate that has ended"), (3, "a certificate that ends soon")])
def test_certificates_are_renewed_in_time(days: float, what: str) -> None:
    broken = BrokenInstallation()
    now = broken.snapshot.now
    authority = Authority.new(timedelta(days=100), now)
    lives = {"ryzanstein-tls-router": timedelta(days=days), "ryzanstein-tls-gateway": timedelta(days=60)}
    broken.objects["certificates"] = [
        {
            "metadata": {"name": secret},
            "data": {"tls.crt": b64encode(authority.issue(Identity("rz.llm", "router"), life, now).certificate)},
        }
        for secret, life in lives.items()
    ]
    renewal = {"metadata": {"name": "ryzanstein-secrets-renewal", "labels": labels("secrets")}}
    for renewals, do in (([renewal], "--from=cronjob/ryzanstein-secrets-renewal"), ([], "by whatever has made it")):
        broken.objects["cronjobs"] = renewals
        finding = one(broken)
        assert (finding.where, finding.what) == ("secret/ryzanstein-tls-router", what)
        assert do in finding.do[-1]


def test_forbidden_resources_are_reported_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    objects = healthy()
    objects["ingresses"] = [
        {
            "metadata": {"name": "ryzanstein", "labels": labels("gateway")},
            "spec": {"ingressClassName": "nginx"},
            "status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}},
        }
    ]
    unread = snapshot(objects, "ingressclasses", "nodes")
    assert not report(unread, as_json=False)
    assert "ingressclasses, nodes" in capsys.readouterr().out


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kube", "doctor", *arguments])


def test_absent_resource_kinds_are_skipped(api: KubeApi) -> None:
    broken = BrokenInstallation()
    for kind in ("podmonitors", "prometheuses", "httproutes"):
        api.refused[kind] = 404  # a cluster without these kinds
    for kind, objects in broken.objects.items():
        api.put(kind, *objects)
    well = doctor()
    assert (well.exit_code, well.output) == (0, "llm/ryzanstein is well: 6 pods\n")
    worker = broken.pending("worker", "0/1 nodes are available: 1 Insufficient memory.")
    worker["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "rz-tls-worker"}}]
    api.put("pods", worker)
    api.refused["nodes"] = api.refused["secrets"] = 403
    ill = doctor()
    assert ill.exit_code == 1
    assert "pod/ryzanstein-workers-default-0 is Pending:" in ill.output
    assert "not looked at, since it may not be read: nodes, secrets" in ill.output
    api.refused["secrets"] = 404  # the pod waits for it
    assert "not looked at, since it may not be read: nodes\n" in doctor().output


@pytest.mark.parametrize(
    ("refused", "status", "expected"),
    [
        ("pods", 403, "pods of namespace llm can't be listed: does it exist, and may you read it?"),
        ("events", 500, "events can't be listed: InternalError (500)"),
        ("secrets", 500, "secret llm/rz-tls-worker: InternalError (500)"),
    ],
)
def test_missing_required_resources_are_named(api: KubeApi, refused: str, status: int, expected: str) -> None:
    worker = pod("w", "worker")
    worker["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "rz-tls-worker"}}]
    api.put("pods", worker)
    api.refused[refused] = status
    done = doctor()
    assert (done.exit_code, done.output) == (1, f"ryzanstein: {expected}\n")


def test_certificates_are_read_without_their_keys(api: KubeApi) -> None:
    worker = pod("w", "worker")
    worker["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": "rz-tls-worker"}}]
    ended = Authority.new(timedelta(days=100)).issue(Identity("rz.llm", "worker"), timedelta(days=-1)).certificate
    data = {"tls.crt": b64encode(ended).decode(), "tls.key": "a2V5"}
    api.put("pods", worker)
    api.put("secrets", {"metadata": {"name": "rz-tls-worker"}, "data": data})
    assert "secret/rz-tls-worker is a certificate that has ended" in doctor().output
    data["tls.crt"] = "bm9uZQ=="  # no certificate: the pods that mount it say so
    api.put("secrets", {"metadata": {"name": "rz-tls-worker"}, "data": data})
    assert "secret/" not in doctor().output
