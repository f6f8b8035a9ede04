"""Fields that Kubernetes fixes when it makes an object: values change none of them, or the chart refuses the upgrade.

The other refusals need the objects of a release in a cluster: `tests/cluster/control_plane/test_fixed.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.charts.rendering import (
    ALL_VALUES,
    HELMS,
    NAMESPACE,
    RELEASE,
    Object,
    Rendered,
    RenderError,
    render,
    run_helm,
)
from tests.kube_api import KubeApi, running_kube_api
from tests.programs import CHART

# By kind; of the other kinds that the chart renders Kubernetes lets everything change.
FIXED = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Job": ("template", "selector", "completions", "completionMode", "podFailurePolicy"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "resources"),
    "Service": ("clusterIP", "loadBalancerClass"),
    "RoleBinding": ("roleRef",),
}
# Refusals of templates/_fixed.tpl, but for the size of a claim, which may grow.
REFUSED = {
    ("StatefulSet ryzanstein-workers-", "volumeClaimTemplates"),
    ("PersistentVolumeClaim ", "accessModes"),
    ("PersistentVolumeClaim ", "storageClassName"),
    ("PersistentVolumeClaim ", "resources"),
    ("Service ryzanstein-gateway", "loadBalancerClass"),
}
# Beside the values files: what each may be switched to in a running release.
SWITCHES = """
gateway: {tenancy: {enabled: true, adminSecret: {name: admin}}}
gateway: {grpc: {enabled: false}, replicasManaged: false, tls: {secretName: public}}
gateway: {service: {type: LoadBalancer, loadBalancerClass: example.com/one}}
redis: {persistence: {enabled: true}}
redis: {persistence: {enabled: true, size: 9Gi, storageClass: fast}}
redis: {mode: external, auth: {enabled: false}, external: {url: "redis://elsewhere:6379/0"}}
redis: {auth: {users: components, generation: 2}}
redis: {auth: {existingSecret: {name: mine}}}
router: {replicas: 3}
tls: {mode: "off"}
tls: {mode: existing, secretPrefix: mine}
openshift: true
bindAddress: "::"
clusterDomain: example.com
coordinator: {enabled: false}
monitoring: {mode: none}
monitoring: {prometheus: {persistence: {enabled: true}}, loki: {enabled: true, persistence: {enabled: true, size: 9Gi}}}
finetuner: {enabled: true, storage: {size: 30Gi, accessModes: [ReadWriteOnce]}}
finetuner: {enabled: true, job: {device: cuda}}
podDefaults: {topologySpread: none, labels: {a: b}, securityContext: {runAsUser: 5}}
commonLabels: {team: blue}
image: {tag: other}
workers: {pools: {default: {model: "hf://org/name"}}}
workers: {pools: {default: {model: "hf://org/name", replicas: 3, storage: {type: perPod, size: 9Gi}}}}
workers: {pools: {default: {model: "hf://org/name", storage: {type: perPod, size: 9Gi, storageClass: fast}}}}
workers: {pools: {default: {model: "hf://org/name", storage: {type: pvc, size: 9Gi}}}}
workers: {pools: {default: {model: "hf://org/name", storage: {type: ephemeral}}}}
workers: {pools: {default: {model: "pvc://claim/folder", autoscaling: {mode: keda}}}}
workers: {pools: {default: {model: "hf://org/name", engine: vllm, device: cuda, tensorParallel: 4, nodes: 2}}}
"""


@pytest.mark.parametrize("major", HELMS)
def test_between_all_values_files_fixed_fields_stay_or_are_refused(major: int) -> None:
    assert len(ALL_VALUES) > 20
    check([render(values, major=major) for values in ALL_VALUES])


def test_between_all_switches_fixed_fields_stay_or_are_refused() -> None:
    assert check([render(), *(render(inline=line) for line in switches())]) == REFUSED


def switches() -> list[str]:
    """Each line as values."""
    return SWITCHES.strip().splitlines()


def check(renderings: list[Rendered]) -> set[tuple[str, str]]:
    """Raise if an upgrade between any two changes a fixed field that the chart does not refuse; return the refused."""
    fields = [dict(fixed(rendered)) for rendered in renderings]
    changed = {
        key
        for one, other in itertools.combinations(fields, 2)
        for key in one
        if key in other and one[key] != other[key]
    }
    refused = {
        (name, field): [r for r in REFUSED if name.startswith(r[0]) and field == r[1]] for name, field in changed
    }
    assert [key for key, reasons in refused.items() if not reasons] == []
    return {reason for reasons in refused.values() for reason in reasons}


def fixed(rendered: Rendered) -> Iterator[tuple[tuple[str, str], object]]:
    """The fixed fields of all objects, by object and field, a missing one as None."""
    for manifest in rendered.of(*FIXED):
        content: Object = manifest.get("spec", manifest)
        for field in FIXED[manifest["kind"]]:
            yield (f"{manifest['kind']} {manifest['metadata']['name']}", field), content.get(field)


def test_every_kind_with_fixed_fields_is_looked_at(rendered: Rendered) -> None:
    """A new kind of object has to be added here, or to those that Kubernetes lets change."""
    changeable = {
        "ConfigMap", "CronJob", "GRPCRoute", "HTTPRoute", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy", "Pod",
        "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "Role", "ScaledObject", "ServiceAccount",
        "TriggerAuthentication", "Certificate", "Issuer", "Lease",
    }  # fmt: skip
    assert {manifest["kind"] for manifest in rendered.objects} <= changeable | FIXED.keys()


def test_redis_may_gain_and_lose_a_claim() -> None:
    """The claim is outside the StatefulSet, and stays when the release does without it."""
    off, on = render(), render(inline="redis: {persistence: {enabled: true, size: 3Gi}}")
    volumes = [volume for pod in on.pods_of("redis") for volume in pod.spec["volumes"] if volume["name"] == "data"]
    assert volumes == [{"name": "data", "persistentVolumeClaim": {"claimName": "data-ryzanstein-redis-0"}}]
    claim = on.named("PersistentVolumeClaim", "data-ryzanstein-redis-0")
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "3Gi"}}}
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not off.of("PersistentVolumeClaim")


def test_administration_of_keys_works_before_keys_are_required() -> None:
    """So that clients have their keys when the gateway begins to ask for them."""
    for enabled in (False, True):
        values = {"gateway": {"tenancy": {"enabled": enabled, "adminSecret": {"name": "admin"}}}}
        (pod,) = render(inline=yaml.safe_dump(values)).pods_of("gateway")
        variables = {variable["name"]: variable.get("value") for variable in pod.containers[0]["env"]}
        assert variables["RYZANSTEIN_ADMIN_PORT"] == "8001"
        assert variables["RYZANSTEIN_ADMIN_TOKEN_FILE"] == "/etc/ryzanstein/admin/token"
        assert variables.get("RYZANSTEIN_TENANCY") == ("true" if enabled else None)
        mounts = [mount["mountPath"] for mount in pod.containers[0]["volumeMounts"]]
        assert "/etc/ryzanstein/admin" in mounts


def upgraded(api: KubeApi, values: str, release: str = RELEASE) -> str:
    """The objects that an upgrade would make; raises RenderError."""
    args = ("--namespace", NAMESPACE, "--is-upgrade", "--dry-run=server", "--kubeconfig", str(api.kubeconfig))
    return run_helm("template", release, str(CHART), *args, "--values", "-", stdin=values)


@pytest.mark.parametrize(
    ("release", "first", "then", "named"),
    [
        (RELEASE, "{}", "fullnameOverride: other", RELEASE),
        (RELEASE, "fullnameOverride: other", "{}", "other"),
        ("llm", "{}", "nameOverride: gateway", "llm-ryzanstein"),
        ("llm", "{nameOverride: a, redis: {mode: external, external: {url: 'redis://r'}, auth: {enabled: false}}}",
         "{nameOverride: b, redis: {mode: external, external: {url: 'redis://r'}, auth: {enabled: false}}}", "llm-a"),
    ],
)  # fmt: skip
def test_other_names_in_a_running_release_are_refused(
    release: str, first: str, then: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under other names Redis would be empty; another release in the namespace has names of its own."""
    with running_kube_api(KubeApi(), tmp_path, monkeypatch) as api:
        for running, inline in ((release, first), ("neighbour", "{}")):
            for deployment in render(inline=inline, release=running).of("Deployment"):
                annotations = {"meta.helm.sh/release-name": running}
                api.put(
                    "deployments", {**deployment, "metadata": {**deployment["metadata"], "annotations": annotations}}
                )
        with pytest.raises(RenderError) as refused:
            upgraded(api, then, release)
        assert "fullnameOverride: nothing has been changed" in str(refused.value)
        assert f"--set fullnameOverride={named}." in str(refused.value)
        with_names = yaml.safe_dump(yaml.safe_load(then) | {"fullnameOverride": named})
        assert f"name: {named}-gateway\n" in upgraded(api, with_names, release)


@pytest.mark.parametrize(
    ("first", "then", "prefix"),
    [
        ("{}", "redis: {keyPrefix: other}", f"{NAMESPACE}-{RELEASE}"),
        ("redis: {keyPrefix: one}", "{}", "one"),
    ],
)
def test_another_prefix_of_keys_in_a_running_release_is_refused(
    first: str, then: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_kube_api(KubeApi(), tmp_path, monkeypatch) as api:
        for deployment in render(inline=first).of("Deployment"):
            annotations = {"meta.helm.sh/release-name": RELEASE}
            api.put("deployments", {**deployment, "metadata": {**deployment["metadata"], "annotations": annotations}})
        with pytest.raises(RenderError) as refused:
            upgraded(api, then)
        assert "redis.keyPrefix: nothing has been changed" in str(refused.value)
        assert f"--set redis.keyPrefix={prefix}." in str(refused.value)
        upgraded(api, f"redis: {{keyPrefix: {prefix}}}")
