"""Settings become vLLM's arguments, and what has a setting of ours is not given twice."""

from __future__ import annotations

import pytest

from services.common.lifecycle import StartupError
from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import check_device, engine_arguments


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
            "limit_mm_per_prompt": {"video": 0, "audio": 0},
        }.items()
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"engine_args": {"dtype": "half"}}, "RYZANSTEIN_ENGINE_ARGS: dtype: use RYZANSTEIN_DTYPE"),
        ({"engine_args": {"kv_events_config": {}}}, "kv_events_config: the worker sets it itself"),
        ({"engine_args": {"mm_processor_cache_gb": 4}}, "mm_processor_cache_gb: the worker sets it itself"),
        ({"engine_args": {"max_loras": 2}}, "max_loras: use RYZANSTEIN_ADAPTER_SLOTS"),
        ({"quantization": "int8"}, "RYZANSTEIN_QUANTIZATION int8"),
        ({"speculation": "off"}, "RYZANSTEIN_SPECULATION off: is the native engine's"),
    ],
)
def test_our_arguments_are_rejected_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        engine_arguments(settings(**given), "/m")


def test_slots_for_adapters_are_vllm_s_with_its_next_larger_rank() -> None:
    arguments = engine_arguments(settings(adapter_sources=("/a",), adapter_slots=3, adapter_max_rank=65), "/m")
    assert {name: arguments.get(name) for name in ("enable_lora", "max_loras", "max_lora_rank")} == {
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 128,
    }
    assert "enable_lora" not in engine_arguments(settings(), "/m")


def test_speculative_config_reaches_vllm_on_gpus_and_is_refused_on_cpus() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    arguments = engine_arguments(settings(engine_args={"speculative_config": drafts}), "/m")
    assert arguments["speculative_config"] == drafts
    check_device(arguments, "cuda")
    with pytest.raises(ValueError, match="speculative_config: vLLM drafts on GPUs only"):
        check_device(arguments, "cpu")
    check_device(engine_arguments(settings(), "/m"), "cpu")
