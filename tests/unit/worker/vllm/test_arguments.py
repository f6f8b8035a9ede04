"""Settings become vLLM's arguments, and what has a setting of ours is not given twice."""

from __future__ import annotations

import pytest

from services.common.lifecycle import StartupError
from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import engine_arguments


def settings(**given: object) -> WorkerSettings:
    return WorkerSettings(model="m", engine="vllm", **given)


def test_settings_and_arguments_reach_vllm() -> None:
    given = engine_arguments(
        settings(tensor_parallel=4, kv_dtype="bf16", max_running=32, engine_args={"gpu_memory_utilization": 0.8}), "/m"
    )
    assert (
        given.items()
        >= {
            "model": "/m",
            "tensor_parallel_size": 4,
            "kv_cache_dtype": "bfloat16",
            "max_num_seqs": 32,
            "gpu_memory_utilization": 0.8,
            "scheduling_policy": "priority",
        }.items()
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"engine_args": {"dtype": "half"}}, "RYZANSTEIN_ENGINE_ARGS: dtype: use RYZANSTEIN_DTYPE"),
        ({"engine_args": {"kv_events_config": {}}}, "kv_events_config: the worker sets it itself"),
        ({"quantization": "int8"}, "RYZANSTEIN_QUANTIZATION int8"),
    ],
)
def test_our_arguments_are_rejected_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        engine_arguments(settings(**given), "/m")
