"""Settings of a worker server from its environment."""

from __future__ import annotations

import os
import socket
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.adapters import check_name, check_path
from services.common.attention import AttentionMode
from services.common.settings import CommaList, ServiceSettings
from services.common.worker_options import Dtype, EngineName, KvDtype, Quantization, Speculation

DEFAULT_KV_TOKENS = 32_768  # size of the KV cache where none is set and memory allows it
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 4096}  # rows of a step, by device


class WorkerSettings(ServiceSettings):
    """Settings of one worker: its model, its ranks, and its limits."""

    worker_id: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", min_length=1)
    worker_port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free one")
    model: str = Field(
        min_length=1,
        description="A folder with config.json and safetensors, a GGUF file or its folder, or a hub id; "
        "owner/name:Q4_K_M chooses among GGUF files",
    )
    revision: str = Field("", description="Branch, tag or commit of a hub id; HF_TOKEN and HF_HUB_OFFLINE are honoured")
    engine: EngineName = Field("native", description="Engine: our own, vLLM, or none (a simulated worker)")
    engine_args: dict[str, Any] = Field(
        {},
        description="Arguments of vLLM's EngineArgs, or of a simulated worker: a JSON object such as "
        '{"gpu_memory_utilization": 0.8}',
    )
    virtual_workers: int = Field(
        1, ge=1, le=2000, description="Simulated workers of this process; their ids end with -0, -1, ..."
    )
    nodes: int = Field(
        1,
        ge=1,
        le=64,
        description="Machines that compute one worker, by vLLM's multi-node mode; their ids end with -0, -1, ...",
    )
    node_service: str = Field("", description="The domain of these machines' names, such as a headless Service's")
    served_model_name: str = Field(
        "", description="The name clients use; default: the folder's, file's or repository's"
    )
    tensor_parallel: int = Field(1, ge=1, le=64)
    dtype: Dtype = "auto"
    quantization: Quantization = Field(
        "auto",
        description="Rounds weights that are stored unquantized while they load: int8 or int4 (where tables "
        "and head are int8), with a scale per 32 inputs; auto and none: as they are stored",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_tokens: int = Field(
        0,
        ge=0,
        description="KV cache size in tokens; 0: 32,768, or fewer if memory is short; on GPUs all free memory of the "
        "share",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory for weights, the largest step and the KV cache"
    )
    kv_dtype: KvDtype = Field(
        "auto",
        description="Numbers of the KV cache: auto (the dtype), bf16, int8 (about half the memory of bf16), "
        "fp8 (as int8; on GPUs)",
    )
    max_model_len: int = Field(0, ge=0, description="Longest sequence; 0: the model's own")
    sampling_defaults: bool = Field(
        True,
        description="Requests that do not name temperature, top_p, top_k, min_p or repetition_penalty get those of the "
        "model's generation_config.json; false: 1, 1, off, off, 1",
    )
    override_generation_config: dict[str, float] = Field(
        {}, description='Values that override the model\'s own: a JSON object such as {"temperature": 0.2}'
    )
    adapters: dict[str, str] = Field(
        {}, description='LoRA adapters that are served from the start: a JSON object such as {"sql": "/adapters/sql"}'
    )
    adapter_sources: CommaList = Field(
        (), description="Folders whose adapters may be loaded while the worker runs, separated by commas; empty: none"
    )
    adapter_slots: int = Field(
        8, ge=1, le=256, description="Adapters computed at a time, if adapters or adapter_sources name any"
    )
    adapter_pins: CommaList = Field(
        (),
        description="Adapters of these names in `adapters` are loaded at the start and keep their slots: fewer than "
        "adapter_slots, separated by commas",
    )
    adapter_cache_mb: int = Field(
        256, ge=0, description="Memory of each rank, in MiB, for adapters that may lose their slots; 0: none"
    )
    adapter_max_rank: int = Field(64, ge=1, le=512, description="Largest rank of an adapter")
    max_running: int = Field(64, ge=1, le=4096, description="Requests computed in one step")
    max_batched_tokens: int = Field(
        0, ge=0, description="Rows of one step: the chunk size of long prompts; 0: 2,048 on CPUs, 4,096 on GPUs"
    )
    prefill_step_ms: float = Field(
        200.0,
        gt=0,
        description="By how much prompts may lengthen a step of decodes; at most by two such steps, less for long "
        "ones, on GPUs by 50 ms if these are shorter",
    )
    gpu_kernels: Literal["auto", "torch"] = Field(
        "auto", description="On GPUs: our kernels in Triton where they pass their checks at the start, or only torch's"
    )
    gpu_graphs: bool = Field(
        True,
        description="On GPUs steps are captured as CUDA graphs, with the collectives of several ranks, and replayed",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether a step is launched before the tokens of the one before are read: auto (on GPUs), on, off",
    )
    speculation: Speculation = Field(
        "auto",
        description="Whether a step verifies drafts of several tokens where that pays: auto, off; texts are the same",
    )
    attention: str = Field(
        "dense",
        description="Attention of requests that do not name it: dense; window(sinks, window): each token to the "
        "first and the last tokens, e.g. window(64, 4096); top_k(pages): to the KV blocks that it chooses, e.g. "
        "top_k(128). Prompts attend to all keys",
    )
    page_summaries: bool = Field(
        False,
        description="Keep summaries of KV blocks, an eighth of their memory in int8 and a sixteenth in bf16, "
        "so that requests may name top_k; always with attention top_k",
    )
    pull_mb_per_s: float = Field(
        250.0, ge=0, description="Assumed rate of KV blocks from other workers until it is measured; 0: never pull"
    )
    standby_tokens: int = Field(
        2048,
        ge=0,
        description="Texts of this length, in tokens, have their KV copied to another worker while they grow, so "
        "that it need not be computed again when this worker is lost or drained; 0: never",
    )
    standby_mb_per_s: float = Field(
        100.0, gt=0, description="Highest rate of copies of running requests' KV to other workers"
    )
    node: str = Field(
        "", description="The worker's machine; KV of running requests is copied to another one; empty: not known"
    )
    host_cache_gib: float = Field(
        0.0, ge=0, description="Memory of the worker's host, in GiB, for KV blocks that may leave the KV cache; 0: none"
    )
    disk_cache: str = Field(
        "", description="A folder for KV blocks that may leave the KV cache; they survive a restart; empty: none"
    )
    disk_cache_gib: float = Field(10.0, gt=0, description="Size of disk_cache for each worker, in GiB")
    disk_cache_write_mb_per_s: float = Field(
        200.0, gt=0, description="Highest rate of writes to disk_cache, for the life of SSDs and for their readers"
    )
    memory_host: str = Field(
        "",
        description="Workers with the same value share a machine's or a pod's memory; empty: this worker shares none",
    )
    max_awake: int = Field(0, ge=0, description="Workers of memory_host that are awake at a time; 0: no limit")
    idle_sleep_s: int = Field(0, ge=0, description="The worker sleeps after this time without requests; 0: never")
    pinned: bool = Field(False, description="The worker never sleeps to make room for others of memory_host")
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="Of idle workers of memory_host, those with the lowest priority sleep first",
    )
    step_merge_ms: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Messages to a gateway are at least so far apart, so that tokens of quick steps share one; first "
        "tokens and ends do not wait; 0: each step sends its own",
    )
    stall_timeout_s: float = Field(1.0, gt=0, description="A rank without heartbeat for this long is lost")
    start_timeout_s: float = Field(300.0, gt=0, description="Longest time for the ranks to load the model and be ready")
    recovery_limit_s: float = Field(
        600.0,
        ge=0,
        description="The process ends when lost ranks are not back after this long; give it two starts; 0: never",
    )
    drain_s: float = Field(5.0, ge=0, description="Time for running requests after SIGTERM, before they are handed off")

    @model_validator(mode="after")
    def _virtual_workers(self) -> Self:
        if self.virtual_workers > 1 and self.engine != "simulated":
            raise ValueError(
                f"RYZANSTEIN_VIRTUAL_WORKERS {self.virtual_workers}: a process holds several workers with "
                "RYZANSTEIN_ENGINE simulated only"
            )
        return self

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The ids of the workers of this process."""
        if self.virtual_workers == 1:
            return (self.worker_id,)
        return tuple(f"{self.worker_id}-{index}" for index in range(self.virtual_workers))

    @field_validator("served_model_name")
    @classmethod
    def _served_model_name(cls, name: str) -> str:
        if name:
            check_name(name)
        return name

    @field_validator("attention")
    @classmethod
    def _attention(cls, attention: str) -> str:
        return str(AttentionMode.parse(attention))

    @field_validator("adapters")
    @classmethod
    def _adapters(cls, adapters: dict[str, str]) -> dict[str, str]:
        for name, folder in adapters.items():
            check_name(name)
            check_path(folder)
        return adapters

    @field_validator("adapter_sources")
    @classmethod
    def _adapter_sources(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        for folder in folders:
            check_path(folder)
        return folders
