"""The chart's environment of a service is what that service reads: names and values both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import certifi
import pytest

from services.common.settings import ServiceSettings
from services.common.tls.issuing import Authority
from services.finetuner.settings import FinetunerSettings
from services.gateway.billing.prices import Price, read_prices
from services.gateway.names.route import read_route, read_routes
from services.gateway.settings import GatewaySettings
from services.kv_coordinator.settings import CoordinatorSettings
from services.router.policies.filters.affordable import Affordable
from services.router.policies.pickers.round_robin import RoundRobin
from services.router.policies.registry import Composition
from services.router.scaling.decision import Targets
from services.router.scaling.pools import Scaling
from services.router.settings import RouterSettings
from services.worker.pool.settings import PoolSettings
from services.worker.settings import WorkerSettings
from tests.certificates import DAY, write
from tests.charts.rendering import Pod, Rendered, RenderError, environment, expected_models, render

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
    "finetuner": FinetunerSettings,
}
PREFIX = "RYZANSTEIN_"
# Fields that Kubernetes fills in.
FIELDS = {"status.podIP": "10.0.0.7", "metadata.name": "pod-0", "metadata.namespace": "serving"}


def _settings_type(pod: Pod) -> type[ServiceSettings]:
    pool = pod.containers[0]["command"][-1] == "services.worker.pool"
    return PoolSettings if pool else SETTINGS[pod.component]


def _fields(pod: Pod) -> set[str]:
    return {PREFIX + name.upper() for name in _settings_type(pod).model_fields}


MOUNTED = "/etc/ryzanstein/"
# Settings look into the files that they name; any certificates do.
FILE = certifi.where()
MOUNTED_AS: dict[str, str] = {}  # replacements of the mounted file or folder of a variable


@pytest.fixture(scope="module", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of certificates, as the chart mounts one."""
    MOUNTED_AS["RYZANSTEIN_TLS_FOLDER"] = str(write(tmp_path_factory.mktemp("tls"), "worker", Authority.new(DAY)))
    yield
    MOUNTED_AS.clear()


def _filled(env: dict[str, Any]) -> dict[str, str]:
    """The variables as the process sees them, secrets as "secret", mounted files as one that exists."""
    filled: dict[str, str] = {}
    for name, value in env.items():
        text = FIELDS.get(value.get("fieldRef", {}).get("fieldPath"), "secret") if isinstance(value, dict) else value
        for earlier, known in filled.items():
            text = text.replace(f"$({earlier})", known)
        filled[name] = MOUNTED_AS.get(name, FILE) if text.startswith(MOUNTED) else text
    return filled


def _settings(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> Any:
    filled = _filled(environment(pod.containers[0]))
    with monkeypatch.context() as patch:
        for name, value in filled.items():
            patch.setenv(name, value)
        return _settings_type(pod)()


def test_services_read_every_variable(rendered: Rendered) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        ours = {name for name in environment(pod.containers[0]) if name.startswith(PREFIX)}
        assert ours - _fields(pod) == set(), pod


def test_services_accept_every_value(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        settings = _settings(pod, monkeypatch)
        assert settings.host in ("0.0.0.0", "::"), pod
        assert settings.advertise_host == FIELDS["status.podIP"], pod


def test_ports_equal_those_of_the_container(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of(*SETTINGS):
        read = _settings(pod, monkeypatch)
        settings = read.model_dump()
        loopback = {"admin_port"} if settings.get("admin_host") == "127.0.0.1" else set()  # by port-forward only
        ports = {value for name, value in settings.items() if name.endswith("_port") and name not in loopback and value}
        for worker in read.workers() if isinstance(read, PoolSettings) else ():
            ports |= {worker.worker_port, worker.metrics_port}
        assert ports == {port["containerPort"] for port in pod.containers[0]["ports"]}, pod


def test_workers_keep_their_name_over_restarts(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in rendered.pods_of("worker"):
        assert _settings(pod, monkeypatch).worker_id == FIELDS["metadata.name"]


SET = """
gateway:
  settings: {maxBodyBytes: 33554432, allowedOrigins: ['https://a.example', 'https://b.example']}
  env: {RYZANSTEIN_MAX_FAULTS: '7'}
router:
  settings:
    queueTimeoutS: 7.5
    policy: {name: mine, filters: [{type: affordable, ms: 1e6}], picker: {type: turn}}
finetuner: {enabled: true, settings: {finetunerParallel: 4}}
workers:
  pools:
    default:
      {settings: {maxRunning: 8, adapters: {sql: /a/sql}, adapterPins: [sql], adapterSources: [/a, /b, /finetuning]},
       kvTokens: 1048576, kvDtype: int8, speculation: off, maxModelLen: 4096, dtype: bfloat16, device: cpu,
       tensorParallel: 3, servedName: mine}
logLevel: debug
telemetryNames: [vllm, gen_ai]
redis: {keyPrefix: shared}
bindAddress: '::'
"""
REACHES: dict[str, dict[str, Any]] = {
    "gateway": {
        "max_body_bytes": 33554432,
        "allowed_origins": ("https://a.example", "https://b.example"),
        "max_faults": 7,
    },
    "router": {
        "queue_timeout_s": 7.5,
        "policy": Composition(name="mine", filters=(Affordable(ms=1e6),), picker=RoundRobin()),
    },
    "coordinator": {},
    "finetuner": {"finetuner_parallel": 4, "finetuner_models": {"mine": "/app/models/smollm2-135m-instruct"}},
    "worker": {
        "max_running": 8,
        "adapters": {"sql": "/a/sql"},
        "adapter_pins": ("sql",),
        "adapter_sources": ("/a", "/b", "/finetuning"),
        "kv_tokens": 1048576,
        "kv_dtype": "int8",
        "speculation": "off",
        "max_model_len": 4096,
        "dtype": "bfloat16",
        "device": "cpu",
        "tensor_parallel": 3,
        "served_model_name": "mine",
    },
}


@pytest.mark.parametrize("component", REACHES)
def test_values_reach_their_service(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (pod,) = render(inline=SET).pods_of(component)
    settings = _settings(pod, monkeypatch)
    expected = REACHES[component] | {"log_level": "debug", "namespace": "shared", "host": "::"}
    expected |= {"telemetry_names": ("vllm", "gen_ai")}
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_setting_that_no_service_knows_is_refused() -> None:
    """The product ignores unknown variables: a typo would change nothing and say nothing."""
    wrong = "{settings: {maxBodyBites: 1}}"
    values = f"{{gateway: {wrong}, router: {wrong}, workers: {{pools: {{default: {wrong}}}}}}}"
    with pytest.raises(RenderError) as refused:
        render(inline=values)
    for place in ("/gateway/settings", "/router/settings", "/workers/pools/default/settings"):
        assert re.search(f"'{place}': .*maxBodyBites", str(refused.value)), place
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


def test_services_know_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first worker, and with a pool at zero, a request waits or gets 503; never 404."""
    rendered = render(inline="workers: {pools: {default: {servedName: one}, second: {servedName: two}}}")
    assert expected_models(rendered) == ["one", "two"]
    (asks,) = rendered.pods_of("test")
    assert environment(asks.containers[0])["MODELS"].splitlines() == ["one", "two"], "helm test asks for each"
    (worker,) = render().pods_of("worker")
    bundled = _settings(worker, monkeypatch).model.rsplit("/", 1)[-1]
    assert expected_models(render()) == [bundled]


def test_coordinators_divide_the_workers_and_routers_know_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(inline="coordinator: {shards: 3}")
    (pod,), (router,) = rendered.pods_of("coordinator"), rendered.pods_of("router")
    service = rendered.named("Service", pod.owner["spec"]["serviceName"])
    assert (pod.owner["kind"], pod.owner["spec"]["replicas"]) == ("StatefulSet", 3)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod.labels.items()
    name = f"{pod.owner['metadata']['name']}-{{}}.{service['metadata']['name']}.serving.svc.cluster.local:50053"
    assert _settings(router, monkeypatch).coordinator_address == tuple(name.format(shard) for shard in range(3))
    for shard in range(3):
        monkeypatch.setitem(FIELDS, "metadata.name", f"ryzanstein-coordinator-{shard}")
        settings = _settings(pod, monkeypatch)
        assert (settings.coordinator_shard, settings.coordinator_shards) == (shard, 3)
    with pytest.raises(RenderError, match=r"coordinator\.shards"):
        render(inline="coordinator: {env: {RYZANSTEIN_COORDINATOR_SHARDS: '2'}}")


def test_routers_may_watch_the_models_and_do_no_more() -> None:
    rendered = render()
    (router,) = rendered.pods_of("router")
    account = router.spec["serviceAccountName"]
    watched = environment(router.containers[0])["RYZANSTEIN_EXPECTED_MODELS_CONFIG_MAP"]
    assert router.spec["automountServiceAccountToken"]
    (binding,) = [each for each in rendered.of("RoleBinding") if each["subjects"][0]["name"] == account]
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["watch"], "resourceNames": [watched]}
    assert rendered.named("Role", binding["roleRef"]["name"])["rules"] == [rule]
    assert not rendered.of("Lease")


def test_routers_may_scale_the_pools_of_mode_builtin_and_do_no_more() -> None:
    modes = {"a": "builtin", "b": "builtin", "c": "hpa-cpu", "d": "keda", "e": "none"}
    pools = ", ".join(f"{pool}: {{autoscaling: {{mode: {mode}}}}}" for pool, mode in modes.items())
    rendered = render(inline=f"workers: {{pools: {{{pools}}}}}")
    _, pods, *rules = rendered.named("Role", "ryzanstein-router")["rules"]
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    (lease,) = rendered.of("Lease")
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "verbs": ["get", "patch"],
            "resourceNames": ["ryzanstein-workers-a", "ryzanstein-workers-b"],
        },
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": ["get", "update"],
            "resourceNames": [lease["metadata"]["name"]],
        },
    ]
    assert "spec" not in lease, "an upgrade changes nothing of what routers write"
    named = {each["metadata"]["name"] for each in rendered.of("StatefulSet")}
    assert set(rules[0]["resourceNames"]) <= named
    assert not [each for each in rendered.of("ClusterRole") if "router" in each["metadata"]["name"]]


def test_routers_know_the_scaled_pools_and_their_targets() -> None:
    """Routers read the chart's pools, with the pool's own targets."""
    values = "firstTokenSeconds: 1.5, tokenMilliseconds: 50, kvPercent: 70, scaleDownAfterSeconds: 60, idleSeconds: 90"
    values += ", schedule: [{hour: 8, min: 3, days: [mon, tue]}, {hour: 9, min: 5}]"
    pools = f"a: {{servedName: one, autoscaling: {{mode: builtin, min: 0, max: 7, {values}}}}}"
    rendered = render(inline=f"workers: {{pools: {{{pools}, b: {{autoscaling: {{mode: keda}}}}}}}}")
    scaling = Scaling.model_validate_json(rendered.named("ConfigMap", "ryzanstein-models")["data"]["scaling"])
    assert scaling.lease == rendered.of("Lease")[0]["metadata"]["name"]
    assert [(pool.name, pool.mode) for pool in scaling.pools] == [("a", "builtin"), ("b", "keda")]
    first, _ = scaling.pools
    assert (first.models, first.stateful_set) == (("one",), "ryzanstein-workers-a")
    monday, wednesday = datetime(2026, 11, 30, 3, tzinfo=UTC), datetime(2026, 12, 2, 3, tzinfo=UTC)
    night = Targets(0, 7, first_token_s=1.5, token_ms=50, kv_share=0.7, idle_s=90, down_after_s=60)
    assert first.targets(monday) == night
    assert [first.targets(day.replace(hour=hour)).least for day in (monday, wednesday) for hour in (8, 9)] == [
        3,
        5,
        0,
        5,
    ]
    assert "scaling" not in render().named("ConfigMap", "ryzanstein-models")["data"]


def test_scaled_pool_restarts_no_router() -> None:
    before, after = render(), render(inline="workers: {pools: {default: {autoscaling: {mode: builtin}}}}")
    (old,), (new,) = before.pods_of("router"), after.pods_of("router")
    assert (old.metadata, old.spec) == (new.metadata, new.spec)


def test_a_model_that_comes_or_goes_replaces_its_own_workers_alone() -> None:
    before, after = render(), render(inline="workers: {pools: {second: {servedName: two}}}")
    for component in ("gateway", "router", "coordinator", "redis"):
        (old,), (new,) = before.pods_of(component), after.pods_of(component)
        assert (old.metadata, old.spec) == (new.metadata, new.spec), component
    old_pool, *_ = before.pods_of("worker")
    assert old_pool.spec in [pod.spec for pod in after.pods_of("worker")]


def test_gateways_read_routes_and_the_schema_refuses_wrong_fields() -> None:
    route = {
        "targets": [{"model": "a", "weight": 3}],
        "fallbacks": [{"model": "b", "when": ["no_worker"]}],
        "wait_s": 2,
    }
    secret = {"name": "openai", "key": "token"}
    externals = {
        "openai": {"baseUrl": "https://api.example.org/v1", "keySecret": secret},
        "local": {"baseUrl": "http://a"},
    }
    rendered = render(inline=json.dumps({"routes": {"chat": route}, "externals": externals}))
    config_map = rendered.named("ConfigMap", "ryzanstein-routes")
    fixed = read_routes(config_map["data"]["routes.json"].encode())
    assert fixed.routes == {"chat": read_route(route)}
    (gateway,) = rendered.pods_of("gateway")
    mounts = {mount["mountPath"]: mount["name"] for mount in gateway.containers[0]["volumeMounts"]}
    volume = mounts[fixed.externals["openai"].key_file.removesuffix("/key")]
    assert {"secretName": "openai", "items": [{"key": "token", "path": "key"}]} in [
        each.get("secret") for each in gateway.spec["volumes"] if each["name"] == volume
    ]
    assert fixed.externals["local"].headers() == {}
    assert environment(gateway.containers[0])["RYZANSTEIN_ROUTES_FILE"] == "/etc/ryzanstein/routes/routes.json"
    for wrong in ({}, {"targets": []}, {**route, "stickie": 1}, {"targets": [{"model": "a", "weight": -1}]}):
        with pytest.raises(RenderError, match="routes"):
            render(inline=json.dumps({"routes": {"chat": wrong}}))
    for name, url in (("a_b", "http://a"), ("a", "ftp://a"), ("a", "https://user@a/v1")):
        with pytest.raises(RenderError, match=rf"externals\.{name}"):
            render(inline=json.dumps({"externals": {name: {"baseUrl": url}}}))


def test_gateways_read_the_prices_of_the_chart_and_the_schema_refuses_wrong_fields() -> None:
    price = {"input": 0.5, "cached_input": 0.1, "output": 1.5, "training": 2.0, "batch_factor": 0.5}
    (gateway,) = render(inline=json.dumps({"gateway": {"prices": {"a": price, "*": {}}}})).pods_of("gateway")
    read = read_prices(environment(gateway.containers[0])["RYZANSTEIN_PRICES"])
    assert read == {"a": Price(**price), "*": Price()}
    assert price.keys() == set(Price.__struct_fields__)
    for wrong in ({"outptu": 1}, {"input": -1}, {"batch_factor": 2}):
        with pytest.raises(RenderError, match="prices"):
            render(inline=json.dumps({"gateway": {"prices": {"a": wrong}}}))
