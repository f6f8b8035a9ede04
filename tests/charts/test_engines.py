"""Pools that vLLM computes: what their pods are told, read against the arguments of `vllm serve`."""

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


def test_a_pool_of_four_gpus_gives_vllm_its_arguments() -> None:
    (pod,) = render(inline=FOUR_GPUS).pods_of("worker")
    (container,) = pod.containers
    assert "worker-vllm" in container["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    env = environment(container)
    caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    assert all(env[name].startswith("/tmp/") for name in caches)  # the root is read-only
    given = {field: env.get(f"RYZANSTEIN_{field.upper()}") for field in WorkerSettings.model_fields}
    chosen = {field: value for field, value in given.items() if isinstance(value, str) and "redis" not in field}
    settings = WorkerSettings(**chosen | {"engine_args": json.loads(chosen["engine_args"])})
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
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.9,
        "hf_overrides": {"rope_theta": 1000000},
    }


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        ("{engine: vllm, device: cuda}", "workers.pools.default.model: the vllm engine serves folders"),
        ("{engine: vllm, model: 'hf://a/b'}", "workers.pools.default.engine: the image worker-vllm is for GPUs"),
        ("{engineArgs: {seed: 1}}", "workers.pools.default.engineArgs: are vLLM's"),
        ("{engine: sglang}", "engine"),
    ],
)
def test_what_cannot_work_is_refused_by_its_value(pool: str, named: str) -> None:
    with pytest.raises(RenderError, match=named):
        render(inline=f"workers: {{pools: {{default: {pool}}}}}")
