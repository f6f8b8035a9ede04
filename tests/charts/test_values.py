"""A wrong value is refused before anything is installed, by a message that names it."""

from __future__ import annotations

import re

import pytest

from tests.charts.rendering import HELMS, RenderError, environment, render

POOL = "workers: {pools: {default: {%s}}}"

# Values and the path that the message must name: every part of it.
OF_THE_SCHEMA = [
    ("gatway: {}", "gatway"),
    ("gateway: {replicaCount: 2}", "gateway.replicaCount"),
    ("gateway: {replicas: two}", "gateway.replicas"),
    ("gateway: {replicas: -1}", "gateway.replicas"),
    ("gateway: {service: {type: Cluster}}", "gateway.service.type"),
    ("gateway: {autoscaling: {mode: on}}", "gateway.autoscaling.mode"),
    ("gateway: {drain: {streamSeconds: -1}}", "gateway.drain.streamSeconds"),
    ("gateway: {image: {repository: x}}", "gateway.image"),
    ("gateway: {tenancy: {keysSecret: name}}", "gateway.tenancy.keysSecret"),
    ("router: {replicas: 0}", "router.replicas"),
    ("logLevel: verbose", "logLevel"),
    ("bindAddress: localhost", "bindAddress"),
    ("image: {pullPolicy: Sometimes}", "image.pullPolicy"),
    ("image: {digests: {gatway: ''}}", "image.digests"),
    ("image: {digests: {gateway: latest}}", "image.digests.gateway"),
    ("podDefaults: {topologySpread: firm}", "podDefaults.topologySpread"),
    (POOL % "model: org/name", "workers.pools.default.model"),
    (POOL % "model: 's3://bucket/x'", "workers.pools.default.model"),
    (POOL % "tensorParallel: 0", "workers.pools.default.tensorParallel"),
    (POOL % "device: gpu", "workers.pools.default.device"),
    (POOL % "dtype: float8", "workers.pools.default.dtype"),
    (POOL % "storage: {type: nfs}", "workers.pools.default.storage.type"),
    (POOL % "autoscaling: {kvPercent: 100}", "workers.pools.default.autoscaling.kvPercent"),
    (POOL % "gpus: 1", "workers.pools.default.gpus"),
    ("workers: {defaults: {tensorParalel: 2}}", "workers.defaults.tensorParalel"),
    ("redis: {mode: sentinel}", "redis.mode"),
    ("redis: {maxMemory: 200mb}", "redis.maxMemory"),
    ("redis: {external: {url: 'http://x'}}", "redis.external.url"),
    ("ingress: {controller: apache}", "ingress.controller"),
    ("tracing: {ratio: 2}", "tracing.ratio"),
    ("monitoring: {collector: {waitSeconds: 0}}", "monitoring.collector.waitSeconds"),
    ("monitoring: {loki: {retention: forever}}", "monitoring.loki.retention"),
    ("tracing: {endpoint: 'jaeger:4317'}", "tracing.endpoint"),
    ("monitoring: {mode: on}", "monitoring.mode"),
    ("monitoring: {rules: {slo: {ttftSeconds: 3}}}", "monitoring.rules.slo.ttftSeconds"),
    ("monitoring: {rules: {overrides: {RyzansteinRedisAway: {For: 1m}}}}", "monitoring.rules.overrides"),
]
# What a schema can't say: values that contradict each other.
OF_VALIDATION = [
    ("redis: {mode: external}", "redis.external.url"),
    ("{gateway: {autoscaling: {mode: keda}}, monitoring: {mode: none}}", "keda.prometheusUrl"),
    ("tracing: {mode: otlp}", "tracing.endpoint"),
    ("tracing: {endpoint: 'http://collector:4317'}", "tracing.endpoint"),
    ("monitoring: {rules: {overrides: {RedisAway: {for: 1m}}}}", "monitoring.rules.overrides.RedisAway"),
    ("gateway: {autoscaling: {mode: hpa-cpu, min: 5, max: 2}}", "gateway.autoscaling.min"),
    (
        POOL % "replicas: 2, model: 'hf://a/b', storage: {type: pvc, accessModes: [ReadWriteOnce]}",
        "storage.accessModes",
    ),
    (POOL % "model: 'hf://a/b', storage: {type: hostPath}", "storage.hostPath"),
    (POOL % "tensorParallel: 4, device: cuda, gpu: {count: 2}", "gpu.count"),
]
ACCEPTED = [
    "global: {anything: {of: ours}, imageRegistry: mirror.example}",
    "gateway: {resources: {requests: {cpu: 1, memory: 1Gi}, limits: {memory: 1Gi}}}",
    "gateway: {resources: {requests: {cpu: '1', memory: 1Gi}, limits: {memory: 1Gi}}}",
    "gateway: {settings: {maxBodyBytes: 1024}, env: {A: null, B: text}}",
    "gateway: {env: {NODE: {valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}}}",
    "podDefaults: {affinity: {podAntiAffinity: {}}, tolerations: [{key: a, operator: Exists}]}",
    POOL % "model: 'hf://org/name@0123abc', servedName: name",
    POOL % "model: 'pvc://claim/path'",
    POOL % "model: 'oci://registry.example/model:1'",
    POOL % "model: 'file:///models/mine'",
    POOL % "device: cuda, tensorParallel: 4, gpu: {count: 4}",
    "enabled: true",
]


@pytest.mark.parametrize("major", HELMS)
@pytest.mark.parametrize(("values", "path"), OF_THE_SCHEMA, ids=[path for _, path in OF_THE_SCHEMA])
def test_the_schema_names_what_is_wrong(values: str, path: str, major: int) -> None:
    with pytest.raises(RenderError) as refused:
        render(inline=values, major=major)
    *parents, last = path.split(".")
    assert "schema" in str(refused.value)
    assert re.search("[./]".join(parents), str(refused.value)), refused.value
    assert last in str(refused.value)


@pytest.mark.parametrize(("values", "path"), OF_VALIDATION, ids=[path for _, path in OF_VALIDATION])
def test_values_that_contradict_each_other_are_refused(values: str, path: str) -> None:
    with pytest.raises(RenderError, match=re.escape(path)):
        render(inline=values)


@pytest.mark.parametrize("values", ACCEPTED)
def test_what_is_allowed_renders(values: str) -> None:
    assert render(inline=values).objects


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
