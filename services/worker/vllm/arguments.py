"""Computes vLLM's engine arguments from the settings of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.lifecycle import StartupError
from services.worker.settings import WorkerSettings
from services.worker.vllm.nodes import node_of

DEFAULT_CPU_KV_TOKENS = 32_768  # vLLM would take most of the machine's memory
# Arguments that have a setting of ours, or on which our engine depends.
_OURS = {
    "model": "RYZANSTEIN_MODEL",
    "tensor_parallel_size": "RYZANSTEIN_TENSOR_PARALLEL",
    "dtype": "RYZANSTEIN_DTYPE",
    "max_model_len": "RYZANSTEIN_MAX_MODEL_LEN",
    "max_num_seqs": "RYZANSTEIN_MAX_RUNNING",
    "max_num_batched_tokens": "RYZANSTEIN_MAX_BATCHED_TOKENS",
    "kv_cache_dtype": "RYZANSTEIN_KV_DTYPE",
    "kv_events_config": "",
    "data_parallel_size": "",
    "stream_interval": "",
    "mm_processor_cache_gb": "",
    "enable_lora": "RYZANSTEIN_ADAPTERS or RYZANSTEIN_ADAPTER_SOURCES",
    "max_loras": "RYZANSTEIN_ADAPTER_SLOTS",
    "max_cpu_loras": "RYZANSTEIN_ADAPTER_SLOTS",
    "max_lora_rank": "RYZANSTEIN_ADAPTER_MAX_RANK",
    "nnodes": "RYZANSTEIN_NODES",
    "node_rank": "RYZANSTEIN_NODES",
    "master_addr": "RYZANSTEIN_NODES",
    "master_port": "RYZANSTEIN_NODES",
}
_BATCHED_TOKENS = 2048
_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's choices for max_lora_rank
_KV_DTYPES = {"bf16": "bfloat16"}  # where vLLM has another name


def engine_arguments(settings: WorkerSettings, folder: str) -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs. Raises StartupError for one that is not the user's to give."""
    for key in sorted(settings.engine_args.keys() & _OURS.keys()):
        instead = f"use {_OURS[key]}" if _OURS[key] else "the worker sets it itself"
        raise StartupError(f"RYZANSTEIN_ENGINE_ARGS: {key}: {instead}")
    if settings.quantization in {"int8", "int4"}:
        raise StartupError(
            f"RYZANSTEIN_QUANTIZATION {settings.quantization}: rounds weights for the native engine; for vLLM name a "
            "method of its own in RYZANSTEIN_ENGINE_ARGS (quantization)"
        )
    if settings.speculation != "auto":
        raise StartupError(
            f"RYZANSTEIN_SPECULATION {settings.speculation}: is the native engine's; vLLM drafts nothing unless "
            "RYZANSTEIN_ENGINE_ARGS has speculative_config"
        )
    if settings.attention != "dense":
        raise StartupError(f"RYZANSTEIN_ATTENTION {settings.attention}: is the native engine's; vLLM attends densely")
    node = node_of(settings)
    return {
        "model": folder,
        "tensor_parallel_size": settings.tensor_parallel,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len or None,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": max(settings.max_batched_tokens or _BATCHED_TOKENS, settings.max_running),
        "kv_cache_dtype": _KV_DTYPES.get(settings.kv_dtype, settings.kv_dtype),
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # gateways apply the publisher's recommendations
        "structured_outputs_config": {"backend": "guidance"},  # the library that gateways compile grammars with
        "mm_processor_cache_gb": 0,  # its two sides differ once a request is cancelled between them
        "limit_mm_per_prompt": {"video": 0, "audio": 0},  # gateways send images alone
        **_for_adapters(settings),
        **(node.arguments() if node else {}),
        **settings.engine_args,
    }


def _for_adapters(settings: WorkerSettings) -> dict[str, Any]:
    """The arguments for slots; vLLM knows a few ranks as the largest one."""
    if not settings.adapters and not settings.adapter_sources:
        return {}
    rank = next(rank for rank in _MAX_RANKS if rank >= settings.adapter_max_rank)
    return {"enable_lora": True, "max_loras": settings.adapter_slots, "max_lora_rank": rank}


def check_device(arguments: Mapping[str, Any], device: str) -> None:
    """Refuse arguments that end vLLM on this kind of device by an assertion; raises ValueError."""
    if device == "cpu" and arguments.get("speculative_config"):
        raise ValueError("speculative_config: vLLM drafts on GPUs only; leave it out, or use RYZANSTEIN_ENGINE native")


def describe_error(error: Exception, arguments: Mapping[str, Any]) -> str:
    """One line for vLLM's error about its arguments."""
    words = " ".join(str(error).replace("AsyncEngineArgs.__init__() got an unexpected", "unknown").split())
    return words or f"{type(error).__name__} for {', '.join(arguments)}"
