"""Pools that vLLM computes: their pods' environment, compared with the arguments of `vllm serve`."""

from __future__ import annotations

import json

import pytest

from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import engine_arguments
from tests.charts.rendering import RenderError, environment, render

FOUR_GPUS = """
workers:
  pools:
    default: null
    large:
      engine: vllm
      device: cuda
      model: hf://org/large
      tensorParallel: 4
      maxModelLen: 32768
      kvDtype: fp8
      engineArgs: {enable_expert_parallel: true, gpu_memory_utilization: 0.9, hf_overrides: {rope_theta: 1000000}}
      settings: {maxRunning: 256, maxBatchedTokens: 8192}
"""


TWO_NODES = """
workers:
  pools:
    default: null
    huge:
      engine: vllm
      device: cuda
      model: hf://org/huge
      tensorParallel: 8
      nodes: 2
      replicas: 2
      engineArgs: {pipeline_parallel_size: 2}
"""


def settings_of(env: dict[str, object], **of_pod: str) -> WorkerSettings:
    """A worker's settings from its container's variables; `of_pod` are those that Kubernetes fills in.

    Those of Redis and of certificates name files that are not here.
    """
    given = {field: env.get(f"RYZANSTEIN_{field.upper()}") for field in WorkerSettings.model_fields}
    chosen = {
        field: value
        for field, value in given.items()
        if isinstance(value, str) and not field.startswith(("redis", "tls"))
    }
    return WorkerSettings(**chosen | {"engine_args": json.loads(chosen["engine_args"])} | of_pod)


def test_a_pool_of_four_gpus_gives_vllm_its_arguments() -> None:
    (pod,) = render(inline=FOUR_GPUS).pods_of("worker")
    (container,) = pod.containers
    assert "worker-vllm" in container["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    env = environment(container)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env
    caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    assert all(env[name].startswith("/tmp/") for name in caches)  # the root is read-only
    settings = settings_of(env)
    # vllm serve /models/org--large --tensor-parallel-size 4 --max-model-len 32768 --kv-cache-dtype fp8 ...
    assert engine_arguments(settings, settings.model) == {
        "model": "/models/org--large",
        "tensor_parallel_size": 4,
        "dtype": "auto",
        "max_model_len": 32768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_dtype": "fp8",
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "structured_outputs_config": {"backend": "guidance"},
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.9,
        "hf_overrides": {"rope_theta": 1000000},
    }


def test_a_pool_on_cpus_takes_an_image_of_ours_shares_memory_and_binds_no_cores() -> None:
    cpu = "image: {references: {worker-vllm: img:cpu}}\nworkers: {pools: {default: {engine: vllm, model: 'file:///model'}}}"
    (pod,) = render(inline=cpu).pods_of("worker")
    (container,) = pod.containers
    assert container["image"] == "img:cpu"
    assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])  # vLLM takes 160 MiB of it
    assert environment(container)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_two_nodes_of_eight_gpus_are_a_worker() -> None:
    rendered = render(inline=TWO_NODES)
    (pod,) = rendered.pods_of("worker")
    (container,) = pod.containers
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    (pods,) = (manifest for manifest in rendered.of("StatefulSet") if "huge" in manifest["metadata"]["name"])
    name, spec = pods["metadata"]["name"], pods["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"], spec["serviceName"]) == (4, "Parallel", name)
    (service,) = (manifest for manifest in rendered.of("Service") if manifest["metadata"]["name"] == name)
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    env = environment(container)
    assert env["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    # vllm serve /models/org--huge --tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 1 ...
    for ordinal, (rank, leader) in enumerate(((0, 0), (1, 0), (0, 2), (1, 2))):
        arguments = engine_arguments(settings_of(env, worker_id=f"{name}-{ordinal}"), "/models/org--huge")
        multi_node = ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend")
        host = f"{name}-{leader}.{name}.{pods['metadata']['namespace']}.svc.cluster.local"
        assert [arguments[key] for key in multi_node] == [2, rank, host, 29501, "mp"]
        assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (8, 2)
    # Ranks choose their ports: all are open between the pods of the pool, and to no other pod.
    (policy,) = (
        manifest for manifest in rendered.of("NetworkPolicy") if manifest["metadata"]["name"] == f"{name}.nodes"
    )
    peers = {"podSelector": {"matchLabels": spec["selector"]["matchLabels"]}}
    assert policy["spec"] == {
        **peers,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [peers]}],
        "egress": [{"to": [peers]}],
    }


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        ("{engine: vllm, device: cuda}", "workers.pools.default.model: the vllm engine serves folders"),
        ("{engine: vllm, model: 'hf://a/b'}", "workers.pools.default.engine: the image worker-vllm is for GPUs"),
        (
            "{engine: vllm, device: cuda, model: 'hf://a/b', speculation: off}",
            "workers.pools.default.speculation: is the na",
        ),
        ("{engine: vllm, model: 'hf://a/b', engineArgs: {speculative_config: {}}}", "speculative_config is for GPUs"),
        ("{speculation: always}", "speculation"),
        ("{engineArgs: {seed: 1}}", "workers.pools.default.engineArgs: are vLLM's"),
        ("{engine: sglang}", "engine"),
    ],
)
def test_an_impossible_pool_is_rejected_by_its_value(pool: str, named: str) -> None:
    with pytest.raises(RenderError, match=named):
        render(inline=f"workers: {{pools: {{default: {pool}}}}}")


def test_nodes_that_cannot_work_are_refused_by_their_value() -> None:
    gpus = "engine: vllm, device: cuda, model: 'hf://a/b', nodes: 2"
    pools = {
        "ours": "nodes: 2",
        "odd": f"{gpus}, tensorParallel: 3",
        "few": f"{gpus}, tensorParallel: 16, gpu: {{count: 4}}",
        "scaled": f"{gpus}, tensorParallel: 2, autoscaling: {{mode: keda}}",
    }
    with pytest.raises(RenderError) as refused:
        render(inline="workers:\n  pools:\n" + "".join(f"    {name}: {{{pool}}}\n" for name, pool in pools.items()))
    for line in (
        "workers.pools.ours.nodes: our own engine's ranks are in one pod",
        "workers.pools.odd.nodes: 3 ranks (tensorParallel times pipeline_parallel_size) can't be shared evenly by 2",
        "workers.pools.few.gpu.count: 4 is less than the 8 ranks of a pod",
        "workers.pools.scaled.autoscaling.mode: scales pods, and a worker of this pool is 2 pods",
    ):
        assert line in str(refused.value)
