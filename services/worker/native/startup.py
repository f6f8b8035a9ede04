"""From settings to the configurations of ranks and scheduler: pure decisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from services.common import denied
from services.common.lifecycle import StartupError
from services.worker.cpu import has_avx2, has_bfloat16
from services.worker.model.loading.hub import Download, local_folder
from services.worker.model.spec import ModelError, ModelSpec
from services.worker.native.model_files import ModelFiles
from services.worker.process.downloader import download
from services.worker.process.rank_group import RankGroupConfig
from services.worker.scheduling.config import SchedulerConfig
from services.worker.settings import WorkerSettings

DEFAULT_KV_TOKENS = 32_768
_NVIDIA_CONTROL = Path("/dev/nvidiactl")


async def model_folder(model: str, revision: str, begins: Callable[[Download], None] = lambda _: None) -> Path:
    """The local folder of a model: a path, or a hub id that is downloaded once, which `begins`; raises StartupError."""
    try:
        folder = local_folder(model) or await download(model, revision, begins)
        if not (folder / "config.json").is_file():
            raise StartupError(f"RYZANSTEIN_MODEL {model}: no config.json in {folder}")
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error
    except PermissionError as error:  # of a folder: that of a file is found where it is opened
        raise StartupError(f"RYZANSTEIN_MODEL {model}: {denied.reason(Path(error.filename))}") from error
    return folder


def model_revision(asked: str, folder: Path) -> str:
    """The commit of a folder that `ryzanstein fetch` or the hub's library filled; else the revision asked for."""
    try:
        return str(json.loads((folder / ".complete").read_text())["commit"])
    except FileNotFoundError:
        return folder.name if folder.parent.name == "snapshots" else asked
    except (OSError, ValueError, KeyError, TypeError):  # somebody else's file of that name
        return asked


def group_config(settings: WorkerSettings, folder: Path, files: ModelFiles) -> RankGroupConfig:
    """How the ranks are started; raises StartupError for what cannot work."""
    spec = files.spec
    try:
        spec.kv_heads_per_rank(settings.tensor_parallel)
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {settings.model}: {error}") from error
    if settings.max_model_len > spec.max_positions:
        raise StartupError(
            f"RYZANSTEIN_MAX_MODEL_LEN {settings.max_model_len}: the model was made for {spec.max_positions}"
        )
    device = _device(settings.device)
    try:
        return RankGroupConfig(
            model_path=str(folder),
            ranks=settings.tensor_parallel,
            dtype=_dtype(settings.dtype, spec, device),
            device=device,
            block_size=settings.kv_block_tokens,
            kv_tokens=settings.kv_tokens or DEFAULT_KV_TOKENS,
            max_running=settings.max_running,
            max_model_len=settings.max_model_len or spec.max_positions,
            pooling=files.pooling.kind,
            normalise_embeddings=files.pooling.normalise,
            eos_token_ids=files.eos_token_ids,
            start_timeout_s=settings.start_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            log_level=settings.log_level.upper(),
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def scheduler_config(ranks: RankGroupConfig, n_blocks: int, max_batched_tokens: int = 2048) -> SchedulerConfig:
    """How much may be planned for ranks that have started with so many blocks."""
    return SchedulerConfig(
        n_blocks=n_blocks,
        block_tokens=ranks.block_size,
        max_model_len=ranks.max_model_len,
        max_running=ranks.max_running,
        max_batched_tokens=max(max_batched_tokens, ranks.max_running),
        max_in_flight=ranks.max_in_flight,
    )


def _dtype(asked: str, spec: ModelSpec, device: str) -> str:
    """`auto` is the checkpoint's own type, float16 as bfloat16, or float32 on a CPU that is slow in anything else."""
    if asked != "auto":
        return asked
    half = spec.dtype != "float32" and (device == "cuda" or has_bfloat16() or has_avx2())
    return "bfloat16" if half else "float32"


def _device(asked: str) -> str:
    """`auto` asks the driver's control device: the server itself has no torch to ask."""
    if asked != "auto":
        return asked
    return "cuda" if _NVIDIA_CONTROL.exists() else "cpu"
