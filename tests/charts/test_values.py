"""A wrong value is refused before anything is installed, by a message that names it."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest

from services.cli.fetch.repository import ModelReference
from tests.charts.rendering import HELMS, RenderError, environment, render
from tests.programs import CHART

# Wrong in every line, and the paths that the schema's message must name.
AGAINST_THE_SCHEMA = """
gatway: {}
gateway:
  replicaCount: 2
  replicas: two
  service: {type: Cluster}
  autoscaling: {mode: on}
  drain: {streamSeconds: -1}
  image: {repository: x}
  tenancy: {keysSecret: name}
router: {replicas: 0}
logLevel: verbose
bindAddress: localhost
image: {pullPolicy: Sometimes, digests: {gatway: ''}}
podDefaults: {topologySpread: firm}
workers:
  defaults: {tensorParalel: 2}
  pools:
    default:
      tensorParallel: 0
      device: gpu
      dtype: float8
      storage: {type: nfs}
      autoscaling: {kvPercent: 100, schedule: [{hour: 24, min: 0, days: [monday]}]}
      gpus: 1
redis: {mode: sentinel}
ingress: {controller: apache}
tracing: {ratio: 2}
monitoring:
  mode: on
  collector: {waitSeconds: 0}
  rules: {slo: {ttftSeconds: 3}, overrides: {RyzansteinRedisAway: {For: 1m}}}
"""
OF_THE_SCHEMA = [
    "gatway",
    "gateway.replicaCount",
    "gateway.replicas",
    "gateway.service.type",
    "gateway.autoscaling.mode",
    "gateway.drain.streamSeconds",
    "gateway.image",
    "gateway.tenancy.keysSecret",
    "router.replicas",
    "logLevel",
    "bindAddress",
    "image.pullPolicy",
    "image.digests.gatway",
    "podDefaults.topologySpread",
    "workers.defaults.tensorParalel",
    *(f"workers.pools.default.{key}" for key in ("tensorParallel", "device", "dtype", "storage.type", "gpus")),
    "workers.pools.default.autoscaling.kvPercent",
    *(f"workers.pools.default.autoscaling.schedule.0.{key}" for key in ("hour", "min", "days.0")),
    "redis.mode",
    "ingress.controller",
    "tracing.ratio",
    "monitoring.mode",
    "monitoring.collector.waitSeconds",
    "monitoring.rules.slo.ttftSeconds",
    "monitoring.rules.overrides.RyzansteinRedisAway.For",
]
# Texts of a wrong form, and how the message says the right one.
WRONG_FORMS = """
fullnameOverride: Upper
redis: {mode: external, keyPrefix: "it's*", maxMemory: 200mb, external: {url: 'redis://:pass-word@host'}}
tracing: {mode: otlp, endpoint: 'jaeger:4317'}
image: {digests: {gateway: latest}}
workers:
  pools:
    default: {model: org/name}
    other: {model: 's3://bucket/x'}
    attends: {attention: 'window(64)', idleSleep: soon}
monitoring:
  prometheus: {retention: forever, retentionSize: 5kB, alertmanagers: [host]}
  loki: {retention: forever}
  rules: {overrides: {RyzansteinRedisAway: {for: soon}}}
"""
_MODEL = (
    "empty (the bundled model), hf://org/name[:quantization][@revision], pvc://claim[/path], oci://image[/path], "
    "hostpath:///folder or file:///folder, without .. in a path"
)
OF_FORMS = {
    "fullnameOverride": "a letter, then a-z, 0-9 and -, no - at the end",
    "redis.keyPrefix": "letters, digits, ., _, : and -",
    "redis.maxMemory": "a whole number and Ki, Mi or Gi, such as 200Mi",
    "redis.external.url": "redis://host:port/number or rediss://host:port/number, without a user or password",
    "tracing.endpoint": "http://host:port or https://host:port",
    "image.digests.gateway": "sha256: and 64 digits of 0-9 and a-f",
    "workers.pools.default.model": _MODEL,
    "workers.pools.other.model": _MODEL,
    "monitoring.prometheus.retention": "a whole number and h, d, w or y, such as 24h",
    "monitoring.prometheus.retentionSize": "a whole number and MB, GB or TB, such as 1500MB",
    "monitoring.prometheus.alertmanagers[0]": "host:port",
    "monitoring.loki.retention": "a whole number and h, d or w, such as 24h",
    "monitoring.rules.overrides.RyzansteinRedisAway.for": "a whole number and s, m, h or d, such as 10m",
    "workers.pools.attends.attention": "dense, window(sinks, window) in tokens, such as window(64, 4096), or "
    "top_k(pages) in KV blocks, such as top_k(128)",
    "workers.pools.attends.idleSleep": "a whole number of seconds, or of s, m, h or d, such as 5m",
}
# Sources with a segment "..".
OUTSIDE = [
    *("pvc://claim/..", "pvc://claim/../x", "pvc://claim/a/../../x", "pvc://claim/a/..", "pvc://../x"),
    *("oci://registry.example/model:1/..", "oci://registry.example/../model:1", "oci://registry.example/m:1/a/../../x"),
    *(
        "hostpath:///../etc",
        "hostpath:///models/../../etc",
        "file:///app/models/../x",
        "file:///..",
        "hf://../x",
        "hf://a/..",
    ),
]
OUTSIDE_THE_NODE = ["models", "../models", "/models/../etc", "/.."]
_BYTES = "a number of bytes, alone or with k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi or Ei, such as 512Mi"
_NUMBER = "a number, alone or with m for thousandths, such as 2, 0.5 or 500m"
# Quantities that Kubernetes refuses, or takes for a part of a byte.
WRONG_QUANTITIES = {
    ("requests", "memory"): (_BYTES, ["1GB", "1gb", "1 Gi", "1Kib", "-1Gi", "512m", "", "1,5Gi", "Gi", "ten"]),
    ("limits", "ephemeral-storage"): (_BYTES, ["1GiB", "4GB", "100m"]),
    ("limits", "hugepages-2Mi"): (_BYTES, ["4MB"]),
    ("requests", "cpu"): (_NUMBER, ["1 core", "0.5c", "500mi", "-1", "half", "1e"]),
    ("limits", "nvidia.com/gpu"): (_NUMBER, ["one"]),
}
QUANTITIES = ["1", "0.5", ".5", "+2", "1e9", "12E6", "1.5Gi", "64Ki", "100k", "2M", "1E", "3Ti"]
PLACES = ("gateway", "redis", "finetuner.job", "workers.defaults", "workers.pools.p.fetch", "monitoring.loki")
SIZES = (
    "workers.defaults.sharedMemory.sizeLimit",
    "workers.pools.p.storage.size",
    "redis.persistence.size",
    "finetuner.storage.size",
)
# Errors that a schema can't express: values that contradict each other.
CONTRADICTIONS = {
    """
    redis: {mode: external}
    tracing: {mode: otlp}
    gateway: {autoscaling: {mode: keda}}
    monitoring: {mode: none, rules: {overrides: {RedisAway: {for: 1m}}}}
    workers:
      pools:
        claim: {replicas: 2, model: 'hf://a/b', storage: {type: pvc, accessModes: [ReadWriteOnce]}}
        host: {model: 'hf://a/b', storage: {type: hostPath}}
        gpus: {tensorParallel: 4, device: cuda, gpu: {count: 2}}
    """: [
        "redis.external.url",
        "tracing.endpoint",
        "keda.prometheusUrl",
        "monitoring.rules.overrides.RedisAway",
        "workers.pools.claim.storage.accessModes",
        "workers.pools.host.storage.hostPath",
        "workers.pools.gpus.gpu.count",
        "workers.pools.gpus.tensorParallel",
    ],
    """
    tracing: {endpoint: 'http://collector:4317'}
    gateway: {autoscaling: {mode: hpa-cpu, min: 5, max: 2}}
    """: ["tracing.endpoint", "gateway.autoscaling.min"],
    """
    monitoring: {mode: none}
    keda: {source: prometheus}
    workers:
      pools:
        queried: {autoscaling: {mode: keda}}
        idle: {autoscaling: {mode: hpa-cpu, min: 0, schedule: [{hour: 8, min: 2}]}}
        planned: {autoscaling: {mode: builtin, max: 3, schedule: [{hour: 7, min: 3}, {hour: 8, min: 4}]}}
    """: [
        "keda.prometheusUrl",
        "workers.pools.idle.autoscaling.min",
        "workers.pools.idle.autoscaling.schedule",
        "workers.pools.planned.autoscaling.schedule[1].min",
    ],
}
# Types that a strict schema could refuse by mistake.
ACCEPTED = """
enabled: true
global: {anything: {of: ours}, imageRegistry: mirror.example}
gateway:
  resources: {requests: {cpu: 1, memory: 1Gi}, limits: {cpu: '2', memory: 1Gi}}
  settings: {maxBodyBytes: 1024}
  env: {A: null, B: text, NODE: {valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}}
podDefaults: {affinity: {podAntiAffinity: {}}, tolerations: [{key: a, operator: Exists}]}
workers:
  pools:
    fetched: {model: 'hf://org/name@0123abc', servedName: name}
    main: {model: 'hf://org/name@main'}
    claim: {model: 'pvc://claim/path'}
    dots: {model: 'pvc://claim/..a/.b/c..d/...'}
    chosen: {model: 'hf://org/name-GGUF:Q4_K_M@v1'}
    image: {model: 'oci://registry.example/model:1'}
    file: {model: 'file:///models/mine'}
    gpus: {model: 'hf://org/large', device: cuda, tensorParallel: 4, gpu: {count: 4}, attention: top_k}
"""


def _complaints(values: str, major: int = 3) -> list[str]:
    """The lines of the message by which Helm refuses the values."""
    with pytest.raises(RenderError) as refused:
        render(inline=dedent(values), major=major)
    return [line.strip() for line in str(refused.value).splitlines()]


@pytest.mark.parametrize("major", HELMS)
def test_the_schema_names_the_wrong_values(major: int) -> None:
    lines = [line for line in _complaints(AGAINST_THE_SCHEMA, major) if line.startswith("- at ")]
    for path in OF_THE_SCHEMA:
        *parents, last = path.split(".")
        place = "/".join(["", *parents])
        assert any(f"'{place}" in line and last in line for line in lines), (path, lines)


@pytest.mark.parametrize("major", HELMS)
def test_a_text_of_a_wrong_form_is_answered_with_the_form_and_not_with_the_value(major: int) -> None:
    lines = _complaints(WRONG_FORMS, major)
    for path, form in OF_FORMS.items():
        assert f"{path}: it should be {form}" in lines
    assert "pass-word" not in "".join(lines)
    assert '"pattern"' not in (CHART / "values.schema.json").read_text(), "its error would show the expression"


@pytest.mark.parametrize("major", HELMS)
def test_model_that_leaves_its_volume_is_rejected(major: int) -> None:
    pools = {f"p{at}": {"model": one} for at, one in enumerate(OUTSIDE)}
    folders = {f"h{at}": {"storage": {"hostPath": one}} for at, one in enumerate(OUTSIDE_THE_NODE)}
    lines = _complaints(json.dumps({"workers": {"pools": pools | folders}}), major)
    expected = [f"workers.pools.{pool}.model: it should be {_MODEL}" for pool in pools]
    expected += [f"workers.pools.{pool}.storage.hostPath: it should be an absolute path without .." for pool in folders]
    assert [line for line in expected if line not in lines] == []


@pytest.mark.parametrize("major", HELMS)
def test_quantity_that_kubernetes_rejects_is_rejected_with_the_form(major: int) -> None:
    values, expected = dict[str, Any](), list[str]()
    for (kind, resource), (form, wrong) in WRONG_QUANTITIES.items():
        places = [f"workers.pools.p{at}" for at in range(len(wrong))] + [*PLACES]
        for place, quantity in zip(places, (*wrong, *[wrong[0]] * len(PLACES)), strict=True):
            _put(values, f"{place}.resources.{kind}", resource, quantity)
            expected.append(f"{place}.resources.{kind}.{resource}: it should be {form}")
    for path in SIZES:
        place, _, key = path.rpartition(".")
        _put(values, place, key, "50GB")
        expected.append(f"{path}: it should be {_BYTES}")
    lines = _complaints(json.dumps(values), major)
    assert [line for line in expected if line not in lines] == []


def test_quantity_that_kubernetes_accepts_is_rendered() -> None:
    pools = {f"p{at}": {"resources": {"requests": {"memory": one, "cpu": one}}} for at, one in enumerate(QUANTITIES)}
    values = {"workers": {"pools": pools}, "global": {"resources": {"limits": {"memory": "others'"}}}}
    pods = {pod.labels["ryzanstein.dev/pool"]: pod for pod in render(inline=json.dumps(values)).pods_of("worker")}
    for pool, one in zip(pools, QUANTITIES, strict=True):
        assert pods[pool].containers[0]["resources"]["requests"] == {"memory": one, "cpu": one}


def _put(values: dict[str, Any], path: str, key: str, value: str) -> None:
    for part in path.split("."):
        values = values.setdefault(part, {})
    values[key] = value


@pytest.mark.parametrize(("values", "paths"), CONTRADICTIONS.items())
def test_contradictory_values_are_rejected(values: str, paths: list[str]) -> None:
    lines = _complaints(values)
    assert [path for path in paths if not any(line.startswith(f"{path}: ") for line in lines)] == []


def test_allowed_values_render() -> None:
    pods = {pod.labels.get("ryzanstein.dev/pool"): pod for pod in render(inline=ACCEPTED).pods_of("worker")}
    assert pods.keys() >= {"fetched", "chosen", "claim", "image", "file", "gpus"}
    chosen = environment(pods["chosen"].containers[0])
    assert chosen["RYZANSTEIN_SERVED_MODEL_NAME"] == "name-GGUF"
    for pool, model in (
        ("fetched", "org/name@0123abc"),
        ("main", "org/name@main"),
        ("chosen", "org/name-GGUF:Q4_K_M@v1"),
    ):
        actual = environment(pods[pool].containers[0])["RYZANSTEIN_MODEL"]
        assert actual == f"/models/{ModelReference.parse(model).name}", "the init container puts it elsewhere"


def test_a_pool_is_dropped_by_null() -> None:
    rendered = render(inline="workers: {pools: {default: null, other: {servedName: m}}}")
    (worker,) = rendered.pods_of("worker")
    assert worker.labels["ryzanstein.dev/pool"] == "other"


def test_null_brings_no_other_default_back() -> None:
    """Helm drops a default that is null; merged from workers.defaults it must not be half there."""
    (pod,) = render(inline="workers: {pools: {default: {env: {A: null}}}}").pods_of("worker")
    assert "A" not in environment(pod.containers[0])


def test_large_numbers_stay_whole() -> None:
    """Helm reads numbers as floats, and would write 1.6777216e+07."""
    (pod,) = render(inline="gateway: {settings: {maxBodyBytes: 16777216}}").pods_of("gateway")
    assert environment(pod.containers[0])["RYZANSTEIN_MAX_BODY_BYTES"] == "16777216"
