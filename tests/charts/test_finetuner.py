"""Fine-tuning: off by default; a training's Job, and one mount path of the claim for all pods that need it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import kubernetes_validate
import pytest

from services.finetuner.cluster.job import build, name_of
from services.finetuner.runner import TrainingTask
from services.finetuner.training.messages import REFUSED, STOPPED
from tests.charts.rendering import OLDEST, Object, Pod, Rendered, RenderError, environment, render
from tests.programs import CHART

VALUES = CHART / "ci" / "finetuner-values.yaml"
COMPONENTS = ("finetuner", "training", "worker")


@cache
def tuned() -> Rendered:
    return render(VALUES)


def template(rendered: Rendered) -> Object:
    manifest: Object = json.loads(rendered.named("ConfigMap", "ryzanstein-finetuner")["data"]["job.json"])
    return manifest


def mounts(pod: Pod) -> dict[str, Object]:
    """The volumes of the first container by path."""
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] | mount for mount in pod.containers[0]["volumeMounts"]}


def test_the_fine_tuner_is_off_by_default() -> None:
    rendered = render()
    assert rendered.pods_of("finetuner", "training") == []
    assert not [manifest for manifest in rendered.objects if "finetun" in manifest["metadata"]["name"]]
    assert not [
        pod for pod in rendered.pods_of("worker") if "RYZANSTEIN_ADAPTER_SOURCES" in environment(pod.containers[0])
    ]


def test_all_users_of_the_claim_mount_the_same_path_and_workers_load_adapters_from_there() -> None:
    env = environment(tuned().pods_of("finetuner")[0].containers[0])
    folder = env["RYZANSTEIN_FINETUNER_FOLDER"]
    for pod in tuned().pods_of(*COMPONENTS):
        mount = mounts(pod)[folder]
        assert mount["persistentVolumeClaim"]["claimName"] == "ryzanstein-finetuning"
        assert bool(mount.get("readOnly")) is (pod.component == "worker"), pod
    for pod in tuned().pods_of("worker"):
        assert environment(pod.containers[0])["RYZANSTEIN_ADAPTER_SOURCES"] == folder
    claim = tuned().named("PersistentVolumeClaim", "ryzanstein-finetuning")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    only_one = render(inline="{finetuner: {enabled: true}, workers: {pools: {other: {servedName: other}}}}")
    mounting = [str(pod) for pod in only_one.pods_of("worker") if folder in mounts(pod)]
    assert mounting == ["StatefulSet ryzanstein-workers-default"]


def test_a_training_finds_the_models_of_its_pools() -> None:
    models = json.loads(environment(tuned().pods_of("finetuner")[0].containers[0])["RYZANSTEIN_FINETUNER_MODELS"])
    assert models == {
        "smollm2-135m-instruct": "/app/models/smollm2-135m-instruct",
        "two": "/models/claimed/one/two",
        "name": "/models/fetched/org--name",
    }
    (training,) = tuned().pods_of("training")
    claims = {
        path: mount["persistentVolumeClaim"]["claimName"]
        for path, mount in mounts(training).items()
        if "/models" in path
    }
    assert claims == {"/models/claimed": "models", "/models/fetched": "ryzanstein-workers-fetched-models"}


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_the_job_of_a_training_is_valid_in_kubernetes(version: str, tmp_path: Any) -> None:
    task = TrainingTask("tenant:ftjob-00061f0000000aabbccddeeff", "ftjob-00061f0000000aabbccddeeff", tmp_path, "/base")
    for rendered in (tuned(), render(inline=f"{{fullnameOverride: {'f' * 27}, finetuner: {{enabled: true}}}}")):
        (manifest,) = [each["data"]["job.json"] for each in rendered.of("ConfigMap") if "job.json" in each["data"]]
        job = build(json.loads(manifest), task, ["a", "b"], "uid")
        kubernetes_validate.validate(job, version, strict=True)
        assert len(job["metadata"]["name"]) <= 63
        assert job["metadata"]["name"] == name_of(json.loads(manifest), task.job_id)
        assert job["metadata"]["ownerReferences"][0]["uid"] == "uid"


def test_the_exit_of_a_pod_decides_about_a_retry() -> None:
    spec = template(tuned())["spec"]
    assert spec["backoffLimit"] == 3
    actions = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert actions == {"FailJob": [REFUSED], "Ignore": [STOPPED]}
    assert {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    } == {spec["template"]["spec"]["containers"][0]["name"]}
    # Two trainings at a time would write to one folder.
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_values_reach_a_training() -> None:
    job = template(tuned())
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tuning"
    (training,) = tuned().pods_of("training")
    (container,) = training.containers
    assert container["image"].endswith(":finetuner-cuda-0.1.0")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert training.spec["tolerations"]
    assert environment(container)["EXTRA"] == "1"
    tuner = environment(tuned().pods_of("finetuner")[0].containers[0])
    assert tuner["RYZANSTEIN_FINETUNER_QUANTIZATIONS"] == "none,nf4"
    on_cpu = render(inline="finetuner: {enabled: true}")
    assert on_cpu.pods_of("training")[0].containers[0]["image"].endswith(":finetuner-cpu-0.1.0")


def test_the_fine_tuner_has_only_needed_permissions() -> None:
    role = tuned().named("Role", "ryzanstein-finetuner")
    allowed = {
        (rule["resources"][0], verb): rule.get("resourceNames") for rule in role["rules"] for verb in rule["verbs"]
    }
    assert allowed == {
        **{("jobs", verb): None for verb in ("create", "get", "list", "delete")},
        **{("pods", verb): None for verb in ("get", "list")},
        ("deployments", "get"): ["ryzanstein-finetuner"],
    }
    assert not [each for each in tuned().of("ClusterRole") if "finetun" in each["metadata"]["name"]]
    (training,) = tuned().pods_of("training")
    assert training.spec["automountServiceAccountToken"] is False
    assert not [name for name in environment(training.containers[0]) if "REDIS" in name], "it needs no Redis"


WRONG = """
finetuner: {enabled: true, pools: [large, fetched, vllm, elsewhere]}
workers:
  pools:
    fetched: {model: 'hf://a/b'}
    vllm: {engine: vllm, device: cuda, model: 'hf://a/b', storage: {type: pvc}}
    elsewhere: {servedName: other, settings: {adapterSources: [/adapters]}}
"""
SAID = (
    "finetuner.pools: there is no pool large; the pools are default, elsewhere, fetched, vllm",
    "finetuner.pools: a training does not see the model of pool fetched in a volume of type emptyDir; "
    "set workers.pools.fetched.storage.type to pvc",
    "finetuner.pools: trainings are for the native engine; pool vllm has vllm",
    "workers.pools.elsewhere.settings.adapterSources: leaves out /finetuning, where the results of fine-tuning are",
)


def test_senseless_values_are_rejected() -> None:
    with pytest.raises(RenderError) as refused:
        render(inline=WRONG)
    lines = [line.strip() for line in str(refused.value).splitlines()]
    assert set(SAID) <= set(lines)
    with pytest.raises(RenderError, match=r"finetuner\.pools: name the pools"):
        render(inline="finetuner: {enabled: true, pools: []}")
