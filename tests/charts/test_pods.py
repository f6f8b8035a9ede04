"""Rules for every pod, in every configuration."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.charts.rendering import NAMESPACE, Pod, Rendered, environment, quantity, render

SERVICES = ("gateway", "router", "coordinator", "worker", "finetuner")
# Pods that talk to the API server; only these may carry a token.
TALK_TO_THE_API = {"router", "secrets", "finetuner", "prometheus", "alloy"}


def test_objects_name_their_namespace(rendered: Rendered) -> None:
    """`helm template | kubectl apply` and Argo CD put them where Helm would."""
    assert {manifest["metadata"].get("namespace") for manifest in rendered.objects} == {NAMESPACE}


def test_no_service_links(rendered: Rendered) -> None:
    """The link of a Service called ryzanstein-gateway would be RYZANSTEIN_GATEWAY_PORT=tcp://..., a setting of ours."""
    assert [str(pod) for pod in rendered.pods if pod.spec.get("enableServiceLinks") is not False] == []


def test_tokens_are_mounted_only_where_the_api_is_called(rendered: Rendered) -> None:
    for pod in rendered.pods:
        token = pod.spec["automountServiceAccountToken"]
        assert isinstance(token, bool), pod
        assert not token or pod.component in TALK_TO_THE_API, pod


def test_restricted_pod_security(rendered: Rendered) -> None:
    for pod in rendered.pods:
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod
        assert security["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost"), pod
        assert not any(pod.spec.get(host) for host in ("hostNetwork", "hostPID", "hostIPC")), pod
        for container in pod.all_containers:
            _restricted(container)
            assert not any(port.get("hostPort") for port in container.get("ports", ())), pod


def _restricted(container: dict[str, object]) -> None:
    security = container["securityContext"]
    assert isinstance(security, dict)
    assert security["allowPrivilegeEscalation"] is False, container["name"]
    assert security["readOnlyRootFilesystem"] is True, container["name"]
    assert security["capabilities"] == {"drop": ["ALL"]}, container["name"]
    assert not security.get("privileged"), container["name"]


def test_a_container_that_failed_says_why(rendered: Rendered) -> None:
    """The end of its log stays with the pod, where `kubectl describe` and `ryzanstein kube doctor` show it."""
    for pod in rendered.pods:
        for container in pod.all_containers:
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", f"{pod}: {container['name']}"


def test_our_pods_run_as_any_user(rendered: Rendered) -> None:
    """The images name a numeric user, and OpenShift chooses one: a user in the manifest would break either."""
    for pod in rendered.pods_of(*SERVICES, "training", "secrets", "test"):
        contexts = [pod.spec["securityContext"], *(each["securityContext"] for each in pod.all_containers)]
        assert not any("runAsUser" in context for context in contexts), pod


def test_openshift_names_no_user_anywhere() -> None:
    for pod in render(inline="openshift: true").pods:
        contexts = [pod.spec["securityContext"], *(each["securityContext"] for each in pod.all_containers)]
        assert not any({"runAsUser", "fsGroup"} & context.keys() for context in contexts), pod


def test_tmp_is_writable(rendered: Rendered) -> None:
    """The root is read-only."""
    for pod in rendered.pods_of(*SERVICES, "training", "secrets", "test"):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        for container in pod.containers:
            mounted = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
            assert "emptyDir" in volumes[mounted["/tmp"]["name"]], f"{pod} {container['name']}"


def test_volumes_are_there(rendered: Rendered) -> None:
    for pod in rendered.pods:
        claims = [claim["metadata"]["name"] for claim in pod.owner["spec"].get("volumeClaimTemplates", ())]
        names = [volume["name"] for volume in pod.spec.get("volumes", ())] + claims
        assert len(names) == len(set(names)), pod
        for container in pod.all_containers:
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in names, f"{pod} {container['name']}"


def test_resources_are_asked_for(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.all_containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), f"{pod} {container['name']}"
            assert "memory" in resources["limits"], f"{pod} {container['name']}"


def test_no_cpu_limits_by_default() -> None:
    """Throttling shows as jitter between tokens."""
    for pod in render().pods_of(*SERVICES):
        assert all("cpu" not in container["resources"]["limits"] for container in pod.containers), pod


def test_variables_have_one_value(rendered: Rendered) -> None:
    for pod in rendered.pods:
        for container in pod.all_containers:
            names = Counter(entry["name"] for entry in container.get("env", ()))
            assert [name for name, times in names.items() if times > 1] == [], f"{pod} {container['name']}"


def test_variables_are_defined_before_use(rendered: Rendered) -> None:
    """Kubernetes leaves $(NAME) as it is when NAME comes later."""
    for pod in rendered.pods:
        for container in pod.all_containers:
            known: set[str] = set()
            for name, value in environment(container).items():
                used = {part.split(")")[0] for part in str(value).split("$(")[1:]}
                assert used <= known, f"{pod} {name}={value}"
                known.add(name)


def test_kubectl_logs_finds_the_container(rendered: Rendered) -> None:
    for pod in rendered.pods:
        default = pod.metadata["annotations"]["kubectl.kubernetes.io/default-container"]
        assert default in [container["name"] for container in pod.containers], pod


def test_secrets_are_referred_to_never_written(rendered: Rendered) -> None:
    """Nothing rendered holds a password: neither a Secret's data nor a plain variable."""
    assert [manifest["metadata"]["name"] for manifest in rendered.of("Secret") if manifest.get("data")] == []
    for pod in rendered.pods:
        for container in pod.all_containers:
            for name, value in environment(container).items():
                if name.endswith(("PASSWORD", "TOKEN", "SECRET")):
                    assert isinstance(value, dict), f"{pod} {name}"


def test_a_configuration_that_changes_restarts_no_serving_pod(rendered: Rendered) -> None:
    for pod in rendered.pods_of("gateway", "router", "coordinator", "worker"):
        assert not [name for name in pod.metadata.get("annotations", {}) if name.startswith("checksum/")], pod


@pytest.mark.parametrize("resource", ["cpu", "memory"])
def test_the_defaults_fit_a_laptop(resource: str) -> None:
    """A single-node cluster with 2 cores has little more than one left; a default that stays Pending is useless."""
    pods = [pod for pod in render().pods if not pod.runs_to_completion]
    total = sum(_requested(pod, resource) for pod in pods)
    assert 0 < total <= {"cpu": 1.0, "memory": 2.5 * 2**30}[resource]


def _requested(pod: Pod, resource: str) -> float:
    each = sum(quantity(container["resources"]["requests"][resource]) for container in pod.containers)
    return each * int(pod.owner["spec"].get("replicas", 1))
