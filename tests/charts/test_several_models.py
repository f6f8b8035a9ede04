"""Pools whose pods have several models: how models come into the pod, who counts the workers, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.router.scaling.pools import Scaling
from tests.charts.rendering import Rendered, RenderError, environment, expected_models, render
from tests.programs import CHART

PoolValues = dict[str, Any]
VALUES = CHART / "ci" / "models-values.yaml"
TWO = [{"model": "file:///a"}, {"model": "file:///b"}]


def pool(**values: object) -> Rendered:
    return render(inline=json.dumps({"workers": {"pools": {"default": values}}}))


def test_each_model_has_a_folder_in_a_volume_or_the_image() -> None:
    rendered = render(VALUES)
    for workers in rendered.pods_of("worker"):
        (container,) = workers.containers
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in workers.spec["volumes"]}
        claims = {claim["metadata"]["name"] for claim in workers.owner["spec"].get("volumeClaimTemplates", ())}
        fetched = [each["command"][2].replace("/", "--").removesuffix("@main") for each in workers.all_containers[:-1]]
        for model in json.loads(environment(container)["RYZANSTEIN_MODELS"]):
            _, root, place = f"{model['model']}/".split("/", 2)
            if root == "models":
                assert place.removesuffix("/").replace(":", "--") in [each.replace(":", "--") for each in fetched]
                assert mounts["/models"] in volumes | claims
            elif root == "sources":
                assert mounts[f"/sources/{place.split('/')[0]}"] in volumes
            else:
                assert root in ("app", "opt")
        names = [each["name"] for each in workers.all_containers]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("mode", ["off", "generated"])
def test_each_fetch_reports_its_download_to_routers(mode: str) -> None:
    rendered = render(VALUES, inline=f'tls: {{mode: "{mode}"}}')
    reporting = set()
    for workers in rendered.pods_of("worker"):
        (worker,) = workers.containers
        for fetch in workers.all_containers[:-1]:
            of_fetch, of_worker = environment(fetch), environment(worker)
            reporting.add(of_fetch.pop("RYZANSTEIN_SERVED_MODEL_NAME"))
            shared = {name: value for name, value in of_fetch.items() if name.startswith("RYZANSTEIN_")}
            assert shared == {name: of_worker[name] for name in shared}
            files = {path for name, path in shared.items() if name.endswith("_FILE")}
            mounts = {mount["mountPath"] for mount in fetch["volumeMounts"]}
            assert all(mounts & {file, str(Path(file).parent)} for file in files)
            assert "/etc/ryzanstein/tls" not in mounts, "it needs no key of the worker's"
    assert reporting
    assert reporting <= set(expected_models(rendered))


def test_routers_expect_and_scale_by_all_models_of_a_pool() -> None:
    assert expected_models(render(VALUES)) == ["five", "four", "one", "six", "small", "three", "two"]
    scaled = pool(models=TWO, autoscaling={"mode": "builtin"})
    scaling = Scaling.model_validate_json(scaled.named("ConfigMap", "ryzanstein-models")["data"]["scaling"])
    assert scaling.pools[0].models == ("a", "b")
    values = {"workers": {"pools": {"default": {"models": TWO, "autoscaling": {"mode": "keda"}}}}}
    by_prometheus = render(inline=json.dumps(values | {"keda": {"source": "prometheus"}}))
    (scaler,) = by_prometheus.of("ScaledObject")
    assert 'model=~"a|b"' in scaler["spec"]["triggers"][0]["metadata"]["query"]


@pytest.mark.parametrize("mode", ["bundled", "operator"])
def test_each_worker_s_metrics_are_scraped_under_its_id(mode: str) -> None:
    rendered = render(VALUES, inline=f"monitoring: {{mode: {mode}}}")
    ports = {
        port["name"]
        for workers in rendered.pods_of("worker")
        for port in workers.containers[0]["ports"]
        if port["name"].startswith("metrics")
    }
    assert ports == {"metrics", *(f"metrics-{index}" for index in range(5))}
    if mode == "operator":
        endpoints = rendered.of("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
        assert {each["port"] for each in endpoints} == ports
        rules = [(each["regex"], each["replacement"]) for each in endpoints[0]["relabelings"] if "replacement" in each]
    else:
        text = rendered.named("ConfigMap", "ryzanstein-prometheus")["data"]["prometheus.yml"]
        matched = re.search(r"port_name\], regex: \"?([^\",}]+)", text) or re.search(r"regex: (metrics\S*)", text)
        assert matched is not None
        assert all(re.fullmatch(matched[1], port) for port in ports)
        rules = re.findall(r"regex: (\(\.\+\);metrics-\S+)\n\s+replacement: (\S+)", text)
    ((regex, replacement),) = rules
    assert re.sub(f"^{regex}$", replacement.replace("$", "\\"), "pod-0;metrics-3") == "pod-0.3"
    assert not re.fullmatch(regex, "pod-0;metrics")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"models": TWO, "model": "file:///c"}, r"default\.model: has no effect with models"),
        ({"models": TWO, "servedName": "c"}, r"default\.servedName: has no effect with models"),
        ({"models": [TWO[0], TWO[0]]}, r"default\.models: several are called a"),
        ({"models": [{"model": "ftp://a"}]}, r"default\.models\[0\]\.model: it should be empty"),
        ({"models": [{"model": "oci://r/a"}]}, r"default\.models\[0\]\.model: it should be|needs a tag"),
        ({"models": [{"model": "file:///a", "servedName": " a"}]}, r"default\.models\[0\]\.servedName: it should be"),
        (
            {"models": [{"model": ""}], "engine": "vllm", "device": "cuda"},
            r"default\.models\[0\]\.model: the vllm engine",
        ),
        (
            {"models": TWO, "nodes": 2, "engine": "vllm", "device": "cuda"},
            r"default\.nodes: a worker over several pods",
        ),
        ({"models": TWO, "settings": {"adapters": {"x": "/x"}}}, r"default\.settings\.adapters: an adapter is of one"),
        ({"models": [TWO[0] | {"pin": True}, TWO[1]], "maxAwake": 1}, r"default\.maxAwake: with 1, 1 models with pin"),
        ({"maxAwake": 1}, r"default\.maxAwake: is for a pool with several models"),
        ({"priority": 1}, r"default\.priority: is for a pool with several models"),
        ({"models": [TWO[0] | {"priority": 1001}]}, "priority"),
        ({"models": TWO, "idleSleep": "5 minutes"}, r"default\.idleSleep: it should be a whole number"),
        ({"models": [{"servedName": "a"}]}, "model"),
        ({"models": [TWO[0] | {"replicas": 2}]}, "replicas"),
        ({"models": [TWO[0] | {"settings": {"workerPort": 2}}]}, "workerPort"),
        ({"models": [{"model": f"file:///m{index}"} for index in range(33)]}, "models"),
        ({"models": TWO, "settings": {"pinned": True}}, "pinned"),
    ],
)
def test_wrong_pools_of_several_models_are_refused_by_name(values: PoolValues, complaint: str) -> None:
    with pytest.raises(RenderError, match=complaint):
        pool(**values)


def test_helm_test_has_time_for_a_wake_of_each_model() -> None:
    deadlines = [rendered.pods_of("test")[0].spec["activeDeadlineSeconds"] for rendered in (render(), render(VALUES))]
    assert deadlines == [120, 120 + 5 * 60]


def test_several_models_are_not_fine_tuned() -> None:
    values = {"finetuner": {"enabled": True}, "workers": {"pools": {"default": {"models": TWO}}}}
    with pytest.raises(RenderError, match=r"finetuner\.pools: pool default has several models"):
        render(inline=json.dumps(values))


@pytest.mark.parametrize(
    ("text", "seconds"), [(90, "90"), ("90", "90"), ("5m", "300"), ("2h", "7200"), ("1d", "86400")]
)
def test_idle_sleep_reaches_workers_in_seconds(text: object, seconds: str) -> None:
    for models in ({}, {"models": TWO}):
        (workers,) = pool(idleSleep=text, pin=not models, **models).pods_of("worker")
        env = environment(workers.containers[0])
        assert env["RYZANSTEIN_IDLE_SLEEP_S"] == seconds
        assert env.get("RYZANSTEIN_PINNED") == (None if models else "true")
    (workers,) = pool().pods_of("worker")
    assert (
        not {"RYZANSTEIN_IDLE_SLEEP_S", "RYZANSTEIN_MAX_AWAKE", "RYZANSTEIN_PINNED"}
        & environment(workers.containers[0]).keys()
    )
