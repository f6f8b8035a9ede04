"""What the chart tells a service is what that service reads: names and values both."""

from __future__ import annotations

from typing import Any

import certifi
import pytest

from services.common.settings import ServiceSettings
from services.gateway.settings import GatewaySettings
from services.kv_coordinator.settings import CoordinatorSettings
from services.router.policies.filters.affordable import Affordable
from services.router.policies.pickers.round_robin import RoundRobin
from services.router.policies.registry import Composition
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.charts.rendering import Pod, Rendered, RenderError, environment, render

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
}
PREFIX = "RYZANSTEIN_"
# What Kubernetes fills in.
FIELDS = {"status.podIP": "10.0.0.7", "metadata.name": "pod-0", "metadata.namespace": "serving"}
POOL = "workers: {pools: {default: {%s}}}"


def _fields(component: str) -> set[str]:
    return {PREFIX + name.upper() for name in SETTINGS[component].model_fields}


MOUNTED = "/etc/ryzanstein/"
# Settings look into the files that they name; any certificates do.
FILE = certifi.where()


def _filled(env: dict[str, Any]) -> dict[str, str]:
    """The variables as the process sees them, secrets as "secret", mounted files as one that exists."""
    filled: dict[str, str] = {}
    for name, value in env.items():
        text = FIELDS.get(value.get("fieldRef", {}).get("fieldPath"), "secret") if isinstance(value, dict) else value
        for earlier, known in filled.items():
            text = text.replace(f"$({earlier})", known)
        filled[name] = FILE if text.startswith(MOUNTED) else text
    return filled


def _settings(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> Any:
    filled = _filled(environment(pod.containers[0]))
    with monkeypatch.context() as patch:
        for name, value in filled.items():
            patch.setenv(name, value)
        return SETTINGS[pod.component]()


def test_services_read_every_variable(rendered: Rendered) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        ours = {name for name in environment(pod.containers[0]) if name.startswith(PREFIX)}
        assert ours - _fields(pod.component) == set(), pod


def test_services_accept_every_value(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        settings = _settings(pod, monkeypatch)
        assert settings.host in ("0.0.0.0", "::"), pod
        assert settings.advertise_host == FIELDS["status.podIP"], pod


def test_ports_are_what_the_container_says(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        settings = _settings(pod, monkeypatch).model_dump()
        ports = {value for name, value in settings.items() if name.endswith("_port") and value}
        assert ports == {port["containerPort"] for port in pod.containers[0]["ports"]}, pod


def test_workers_keep_their_name_over_restarts(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of("worker"):
        assert _settings(pod, monkeypatch).worker_id == FIELDS["metadata.name"]


@pytest.mark.parametrize(
    ("values", "component", "name", "expected"),
    [
        ("gateway: {settings: {maxBodyBytes: 33554432}}", "gateway", "max_body_bytes", 33554432),
        (
            "gateway: {settings: {allowedOrigins: ['https://a.example', 'https://b.example']}}",
            "gateway",
            "allowed_origins",
            ("https://a.example", "https://b.example"),
        ),
        ("router: {settings: {queueTimeoutS: 7.5}}", "router", "queue_timeout_s", 7.5),
        (
            "router: {settings: {policy: {name: mine, filters: [{type: affordable, ms: 1e6}], picker: {type: turn}}}}",
            "router",
            "policy",
            Composition(name="mine", filters=(Affordable(ms=1e6),), picker=RoundRobin()),
        ),
        ("coordinator: {settings: {hotPrefixes: 64}}", "coordinator", "hot_prefixes", 64),
        (POOL % "settings: {maxRunning: 8}", "worker", "max_running", 8),
        (POOL % "kvTokens: 1048576", "worker", "kv_tokens", 1048576),
        (POOL % "maxModelLen: 4096", "worker", "max_model_len", 4096),
        (POOL % "dtype: bfloat16", "worker", "dtype", "bfloat16"),
        (POOL % "device: cpu", "worker", "device", "cpu"),
        (POOL % "tensorParallel: 2", "worker", "tensor_parallel", 2),
        (POOL % "servedName: mine", "worker", "served_model_name", "mine"),
        ("logLevel: debug", "worker", "log_level", "debug"),
        ("redis: {keyPrefix: shared}", "router", "namespace", "shared"),
        ("bindAddress: '::'", "coordinator", "host", "::"),
        ("gateway: {env: {RYZANSTEIN_MAX_CHOICES: '7'}}", "gateway", "max_choices", 7),
    ],
)
def test_a_value_reaches_its_service(
    values: str, component: str, name: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod,) = render(inline=values).pods_of(component)
    assert getattr(_settings(pod, monkeypatch), name) == expected


def test_a_setting_that_no_service_knows_is_refused() -> None:
    """The product ignores unknown variables: a typo would change nothing and say nothing."""
    for component, values in [("gateway", "gateway: {%s}"), ("router", "router: {%s}"), ("worker", POOL)]:
        with pytest.raises(RenderError, match="maxBodyBites"):
            render(inline=values % "settings: {maxBodyBites: 1}")
        assert component
    with pytest.raises(RenderError, match="policy"):
        render(inline="router: {settings: {policy: {filters: [{type: afordable}]}}}")


def test_a_variable_can_be_taken_away() -> None:
    (pod,) = render(inline="gateway: {envUnset: [RYZANSTEIN_LOG_LEVEL]}").pods_of("gateway")
    env = environment(pod.containers[0])
    assert "RYZANSTEIN_LOG_LEVEL" not in env
    assert "RYZANSTEIN_NAMESPACE" in env


def test_a_variable_can_come_from_a_secret() -> None:
    source = "{valueFrom: {secretKeyRef: {name: s, key: k}}}"
    (pod,) = render(inline=f"gateway: {{env: {{EXTRA: {source}}}}}").pods_of("gateway")
    assert environment(pod.containers[0])["EXTRA"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_a_pool_overrides_the_defaults_key_by_key() -> None:
    values = "workers: {defaults: {env: {A: '1', B: '1'}}, pools: {default: {env: {B: '2'}}}}"
    (pod,) = render(inline=values).pods_of("worker")
    env = environment(pod.containers[0])
    assert (env["A"], env["B"]) == ("1", "2")


def _expected_models(rendered: Rendered, component: str) -> list[str]:
    """The names in the file that the component's pods read, from the ConfigMap that is mounted there."""
    (pod,) = rendered.pods_of(component)
    folder, _, key = environment(pod.containers[0])["RYZANSTEIN_EXPECTED_MODELS_FILE"].rpartition("/")
    (mount,) = [mount for mount in pod.containers[0]["volumeMounts"] if mount["mountPath"] == folder]
    assert "subPath" not in mount, "kubelet does not renew it"
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    names: str = rendered.named("ConfigMap", volume["configMap"]["name"])["data"][key]
    return names.splitlines()


def test_services_know_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first worker, and with a pool at zero, a request waits or gets 503; never 404."""
    rendered = render(inline="workers: {pools: {default: {servedName: one}, second: {servedName: two}}}")
    for component in ("gateway", "router"):
        assert _expected_models(rendered, component) == ["one", "two"]
    (worker,) = render().pods_of("worker")
    bundled = _settings(worker, monkeypatch).model.rsplit("/", 1)[-1]
    assert _expected_models(render(), "gateway") == [bundled]


def test_a_model_that_comes_or_goes_restarts_only_its_own_workers() -> None:
    before, after = render(), render(inline="workers: {pools: {second: {servedName: two}}}")
    for component in ("gateway", "router", "coordinator", "redis"):
        (old,), (new,) = before.pods_of(component), after.pods_of(component)
        assert (old.metadata, old.spec) == (new.metadata, new.spec), component
    old_pool, *_ = before.pods_of("worker")
    assert old_pool.spec in [pod.spec for pod in after.pods_of("worker")]
