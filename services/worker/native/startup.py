"""Derives the configurations of ranks and scheduler from the settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from services.common import denied
from services.common.attention import TOP_K, AttentionMode
from services.common.lifecycle import StartupError
from services.compute.backends.sizing import HostRoom, least_kv_tokens
from services.compute.cpu import has_avx2, has_bfloat16
from services.compute.model.footprint import footprint, snapshot_rows
from services.compute.model.loading.folder import ModelFolder, open_folder
from services.compute.model.loading.hub import Download, local_model
from services.compute.model.spec import ModelError, ModelSpec
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount, in_mib
from services.worker.engine.errors import NoRoomError
from services.worker.kv_transfer.opening import TierSizes
from services.worker.process.downloader import download
from services.worker.scheduling.config import SchedulerConfig
from services.worker.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_KV_TOKENS, WorkerSettings

_GIB = 1 << 30
# Longest operation between two heartbeats of a rank that computes. On a CPU, 2,048 rows of a large model's layer that
# attend to 100,000 keys take minutes; a GPU's host only waits.
BUSY_TIMEOUT_S = {"cpu": 600.0, "cuda": 60.0}
_LOWER_FOR_ADAPTERS = ", RYZANSTEIN_ADAPTER_SLOTS, RYZANSTEIN_ADAPTER_MAX_RANK, RYZANSTEIN_ADAPTER_CACHE_MB"
_LOWER_HOST_CACHE = ", RYZANSTEIN_HOST_CACHE_GIB"
_NVIDIA_CONTROL = Path("/dev/nvidiactl")

log = logging.getLogger(__name__)


async def model_folder(model: str, revision: str, begins: Callable[[Download], None] = lambda _: None) -> Path:
    """The local folder or GGUF file of a path or of a hub id, after its download, which `begins` announces.

    Raises StartupError.
    """
    try:
        folder = local_model(model) or await download(model, revision, begins)
        if not folder.is_file() and not (folder / "config.json").is_file():
            raise StartupError(f"RYZANSTEIN_MODEL {model}: neither config.json nor a GGUF file in {folder}")
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error
    except PermissionError as error:  # a folder's permissions; opening a file reports the file's
        raise StartupError(f"RYZANSTEIN_MODEL {model}: {denied.reason(Path(error.filename))}") from error
    return folder


def model_revision(revision: str, folder: Path) -> str:
    """The commit of a folder, or of a file's, that `ryzanstein fetch` or the hub's library made; otherwise `asked`."""
    # A GGUF file may lie in a folder of its repository.
    for place in (folder.parent, folder.parent.parent) if folder.is_file() else (folder,):
        try:
            return str(json.loads((place / ".complete").read_text())["commit"])
        except FileNotFoundError:
            if place.parent.name == "snapshots":
                return place.name
        except (OSError, ValueError, KeyError, TypeError):  # another program's file of that name
            return revision
    return revision


def read_model(path: Path) -> ModelFolder:
    """Read all files of a folder or a GGUF file but the weights. Raises StartupError with every problem."""
    try:
        return open_folder(path).require()
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error


def group_config(settings: WorkerSettings, model: ModelFolder) -> RankGroupConfig:
    """The configuration of the ranks; raises StartupError for settings that cannot work."""
    spec = model.spec
    try:
        spec.kv_heads_per_rank(settings.tensor_parallel)
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {settings.model}: {error}") from error
    if settings.max_model_len > spec.max_positions:
        raise StartupError(
            f"RYZANSTEIN_MAX_MODEL_LEN {settings.max_model_len}: the model was made for {spec.max_positions}"
        )
    longest = settings.max_model_len or min(spec.max_positions, model.embedding.max_tokens or spec.max_positions)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, spec, device)
    fills = device == "cuda" and spec.generates and not settings.kv_tokens
    # Without layers that attend, a token takes no memory.
    default = DEFAULT_KV_TOKENS if spec.n_attending else settings.max_running * longest
    kv_tokens = 0 if spec.bidirectional else settings.kv_tokens or default
    whole_frame = spec.vision.frame_tokens if spec.vision and spec.vision.sees_ahead else 0
    try:
        return RankGroupConfig(
            model_path=str(model.path),
            ranks=settings.tensor_parallel,
            dtype=dtype,
            quantization="none" if settings.quantization == "auto" else settings.quantization,
            device=device,
            kv_tokens=None if fills else kv_tokens,
            caches=not spec.bidirectional,
            kv_fits=not settings.kv_tokens,
            page_summaries=settings.page_summaries or AttentionMode.parse(settings.attention).name == TOP_K,
            kv_fills=fills,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_format=_kv_format(settings.kv_dtype, dtype, device),
            max_running=settings.max_running,
            max_batched_tokens=max(
                settings.max_batched_tokens or DEFAULT_BATCHED_TOKENS[device],
                longest if spec.bidirectional else 0,
                settings.max_running + whole_frame if whole_frame else 0,
            ),
            max_model_len=longest,
            adapter_slots=settings.adapter_slots if settings.adapters or settings.adapter_sources else 0,
            adapter_max_rank=settings.adapter_max_rank,
            adapter_cache_bytes=settings.adapter_cache_mb << 20,
            pooling=model.pooling.kind,
            normalise_embeddings=model.pooling.normalise,
            embedding_size=model.pooling.size,
            eos_token_ids=model.eos_token_ids,
            gpu_kernels=settings.gpu_kernels,
            gpu_graphs=settings.gpu_graphs,
            overlap=settings.overlap,
            # A draft that falls cannot be taken back from a state.
            speculation=settings.speculation == "auto" and not spec.has_state,
            has_state=spec.has_state,
            snapshots=snapshot_rows(spec, settings.tensor_parallel, dtype),
            frame_patches=spec.vision.frame_patches if spec.vision else 0,
            row_patches=spec.vision.square**2 if spec.vision else 0,
            frame_layers=spec.vision.n_layers if spec.vision else 1,
            frame_tokens=whole_frame,
            frame_bytes=spec.vision.frame_bytes if spec.vision else 0,
            start_timeout_s=settings.start_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            busy_timeout_s=BUSY_TIMEOUT_S[device],
            log_level=settings.log_level.upper(),
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def scheduler_config(
    ranks: RankGroupConfig, n_blocks: int, max_batched_tokens: int = 2048, snapshot_s: float = 0.0
) -> SchedulerConfig:
    """The scheduler's configuration for ranks that have started with `n_blocks` blocks.

    `snapshot_s`: the seconds of a snapshot's copy, which they have measured.
    """
    most = max(max_batched_tokens, ranks.max_running + ranks.frame_tokens, 0 if ranks.caches else ranks.max_model_len)
    return SchedulerConfig(
        n_blocks=n_blocks,
        block_tokens=ranks.block_tokens,
        max_model_len=ranks.max_model_len,
        max_running=ranks.max_running,
        max_batched_tokens=most,
        max_in_flight=ranks.max_in_flight,
        speculation=ranks.speculation,
        has_state=ranks.has_state,
        snapshots=ranks.snapshots,
        snapshot_s=snapshot_s,
        row_cost=ranks.row_patches,
        frame_layers=ranks.frame_layers,
        frame_tokens=ranks.frame_tokens,
    )


def check_tiers(settings: WorkerSettings, spec: ModelSpec, ranks: RankGroupConfig) -> None:
    """Raise StartupError for places of KV blocks that cannot work."""
    tiers = tier_sizes(settings)
    continues = ranks.caches and spec.n_attending and (ranks.snapshots or not ranks.has_state)
    if (tiers.host_bytes or tiers.disk_path) and not continues:
        name = "RYZANSTEIN_DISK_CACHE" if tiers.disk_path else "RYZANSTEIN_HOST_CACHE_GIB"
        raise StartupError(
            f"{name}: only for models with a KV cache whose prompts are continued from it; this one's are not"
        )
    tiers.check()


def tier_sizes(settings: WorkerSettings) -> TierSizes:
    """The places of KV blocks below the device."""
    return TierSizes(
        int(settings.host_cache_gib * _GIB),
        settings.disk_cache,
        int(settings.disk_cache_gib * _GIB),
        settings.disk_cache_write_mb_per_s * 1e6,
    )


def require_room(settings: WorkerSettings, spec: ModelSpec, config: RankGroupConfig, room: HostRoom) -> None:
    """Raise StartupError, before the weights are read, if the ranks do not fit `room`; its message names settings."""
    if config.device != "cpu" or config.kv_tokens is None:
        return  # a rank checks the memory of its GPU itself
    tokens = least_kv_tokens(config.kv_tokens, config.max_model_len) if config.kv_fits else config.kv_tokens
    sizes = footprint(spec, config)
    host_cache = tier_sizes(settings).host_bytes
    whole, least = (sizes.of_worker(n, host_cache) for n in (config.kv_tokens, tokens))
    needed = least.total
    log.info("memory: server and ranks need %s MiB (%s)", in_mib(whole.total), whole.explain())
    if needed <= room.available:
        return
    parts, do = f"{least.explain()}; kv: {tokens:,} tokens in {sizes.kv_format}", "give the machine more memory"
    if room.limit is not None:
        limit = room.limit - room.available + needed  # includes the memory of the server and other processes
        do = f"set the container's memory limit to {in_mib(limit)} MiB or more (it is {in_mib(room.limit)} MiB)"
    raise StartupError(
        f"RYZANSTEIN_MODEL {settings.model}: server and ranks need {in_mib(needed)} MiB of memory "
        f"({parts}) but {in_mib(room.available)} MiB are available: {do}, or lower "
        f"RYZANSTEIN_KV_TOKENS, RYZANSTEIN_MAX_MODEL_LEN{_LOWER_HOST_CACHE if host_cache else ''}"
        f"{_LOWER_FOR_ADAPTERS if least.adapters else ''} or "
        f"{'RYZANSTEIN_MAX_RUNNING' if least.states else 'RYZANSTEIN_MAX_BATCHED_TOKENS'}"
    )


def require_room_to_wake(account: MemoryAccount, held: int, available: int, promised: int) -> None:
    """Raise NoRoomError if a worker that sleeps, and holds `held` bytes, has no room for its account.

    `promised`: bytes that other workers have yet to take of those that are `available`.
    """
    needed, room = account.total - account.server - held, max(0, available - promised)
    if needed > room:
        others = f", without {in_mib(promised)} MiB that workers which woke have yet to take" if promised else ""
        raise NoRoomError(f"to wake takes {in_mib(needed)} MiB of memory but {in_mib(room)} MiB are available{others}")


def _dtype(dtype_setting: str, spec: ModelSpec, device: str) -> str:
    """The dtype; `auto` is the checkpoint's, with bfloat16 for float16, or float32 on a CPU that is slow in others."""
    if dtype_setting != "auto":
        return dtype_setting
    half = spec.dtype != "float32" and (device == "cuda" or has_bfloat16() or has_avx2())
    return "bfloat16" if half else "float32"


def _kv_format(kv_dtype: str, dtype: str, device: str) -> str:
    """Return the KV format; "" for numbers of the dtype. Raises ValueError."""
    if kv_dtype == "fp8" and device == "cpu":
        raise ValueError("RYZANSTEIN_KV_DTYPE fp8: CPUs convert 8-bit floats slowly; use int8, which is more exact")
    kv_format = {"auto": dtype, "bf16": "bfloat16"}.get(kv_dtype, kv_dtype)
    return "" if kv_format == dtype else kv_format


def _device(device: str) -> str:
    """The device; `auto` looks for the GPU driver's control device, because the server does not import torch."""
    if device != "auto":
        return device
    return "cuda" if _NVIDIA_CONTROL.exists() else "cpu"
