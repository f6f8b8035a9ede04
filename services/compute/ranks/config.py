"""Configuration of a group of ranks, the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PoolingKind = Literal["mean", "cls", "last"]
Quantization = Literal["none", "int8", "int4"]

# Of collectives, per rank: a tag, then the bytes in each parity's buffer on the next cache line.
COLLECTIVE_HEADER_BYTES = 4096
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RankGroupConfig:
    """One tensor-parallel group. The KV cache is sized by exactly one of n_blocks, kv_tokens and kv_fills."""

    model_path: str
    ranks: int = 1
    dtype: str = "bfloat16"
    quantization: Quantization = "none"  # rounding of weights that are stored unquantized
    device: str = "cpu"  # "cpu", or "cuda": rank r uses device r
    block_tokens: int = 16
    n_blocks: int | None = None
    kv_tokens: int | None = None
    kv_format: str = ""  # name of a KV format; empty: numbers of `dtype`
    caches: bool = True  # False: a bidirectional model, which has no KV cache
    page_summaries: bool = False  # keep summaries of KV blocks, by which decodes can choose the blocks that they read
    kv_fits: bool = False  # when memory is short, allocate fewer blocks instead of failing
    kv_fills: bool = False  # the cache takes what is left of `gpu_memory_utilization`
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that a rank may take
    max_running: int = 64
    max_batched_tokens: int = 2048  # rows of a step
    max_model_len: int = 4096
    adapter_slots: int = 0  # adapters that can be computed at a time; 0: none
    adapter_max_rank: int = 64
    adapter_cache_bytes: int = 0  # bytes of a rank for adapters that may lose their slots
    pooling: PoolingKind = "mean"
    normalise_embeddings: bool = True
    embedding_size: int = 0  # the first numbers of an embedding, which are kept; 0: all
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text where its grammar allows the end
    max_in_flight: int = 2  # plans in flight
    gpu_kernels: Literal["auto", "torch"] = (
        "auto"  # on GPUs our kernels in Triton where they pass their checks, or none
    )
    gpu_graphs: bool = True  # on GPUs replay steps as CUDA graphs
    overlap: Literal["auto", "on", "off"] = "auto"  # launch a step before the tokens of the one before are read
    speculation: bool = False  # decodes carry proposals where that pays
    has_state: bool = False  # the model's layers keep a state for each slot
    snapshots: int = 0  # rows for copies of states, from which prefixes are continued
    frame_patches: int = 0  # rows of the vision tower for the largest frame of an image; 0: texts alone
    row_patches: int = 0  # rows of the tower that become a row of the decoder
    frame_layers: int = 1  # layers of the vision tower
    frame_bytes: int = 0  # bytes of the largest frame's pixels
    frame_tokens: int = 0  # rows of a frame that one step computes together; 0: a step may end within a frame
    start_timeout_s: float = 300.0
    stall_timeout_s: float = 1.0  # no heartbeat and no CPU time used, while work is pending
    busy_timeout_s: float = 60.0  # no heartbeat although CPU time is used: one very long operation, or a loop
    collective_timeout_s: float = 90.0
    stop_grace_s: float = 3.0
    rank_module: str = "services.worker.rank"  # Python module of a rank process
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        if self.quantization not in get_args(Quantization):
            raise ValueError(f"quantization {self.quantization!r} is not one of {', '.join(get_args(Quantization))}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is not one of cpu, cuda")
        if (self.n_blocks is not None) + (self.kv_tokens is not None) + self.kv_fills != 1:
            raise ValueError("size the KV cache by exactly one of n_blocks, kv_tokens, kv_fills")
        if self.kv_fills and self.device == "cpu":
            raise ValueError("kv_fills is for the memory of GPUs")
        for name in ("ranks", "block_tokens", "max_running", "max_batched_tokens", "max_model_len", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.caches and not self.kv_fills and self.blocks_wanted < 1:
            raise ValueError("a KV cache holds at least one block")

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap; on CPUs the host computes them, and nothing is gained."""
        return self.overlap == "on" or (self.overlap == "auto" and self.device == "cuda")

    @property
    def state_rows(self) -> int:
        """Rows of states: one for each slot, then the snapshots; 0 for models without states."""
        return self.max_running + self.snapshots if self.has_state else 0

    @property
    def frames_per_step(self) -> int:
        """Largest frames in a step, or as many bytes of smaller ones: those that rows pay for, and two first ones."""
        return self.max_batched_tokens // self.frame_patches + 2 if self.frame_patches else 0

    @property
    def blocks_wanted(self) -> int:
        """Configured number of KV blocks, the null block excluded; 0 with `kv_fills`."""
        if not self.caches:
            return 0
        return self.n_blocks or -(-(self.kv_tokens or 0) // self.block_tokens)
