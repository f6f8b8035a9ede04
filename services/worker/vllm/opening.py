"""Opens vLLM as the engine of a model folder."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ryzanstein.v1 import worker_pb2 as pb

from services.common.extras import pip_install
from services.common.gguf_files import SUFFIX
from services.common.lifecycle import StartupError
from services.common.tls.credentials import Tls
from services.compute.model.families.classifying import read_classes
from services.compute.model.families.config import Config
from services.compute.model.loading.folder import ModelFolder, open_folder
from services.compute.model.loading.pooling import NAMED, EmbeddingFiles, read_size
from services.compute.model.loading.sampling import named, override_sampling
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from services.worker.adapters.opening import adapter_sources, named_adapters
from services.worker.engine.base import LifeObserver, StepObserver
from services.worker.engine.state import EngineModel, classes_message
from services.worker.settings import WorkerSettings
from services.worker.vllm.arguments import describe_error, engine_arguments
from services.worker.vllm.engine import VllmEngine
from services.worker.vllm.images import images_taken
from services.worker.vllm.nodes import NodeRendezvous
from services.worker.vllm.progress import StartClock

INSTALL = pip_install("vllm")
log = logging.getLogger(__name__)


async def open_vllm(
    settings: WorkerSettings, folder: Path, steps: StepObserver, life: LifeObserver, tls: Tls | None = None
) -> VllmEngine:
    """Check settings and files and make the engine, whose `run` starts vLLM's processes. Raises StartupError.

    `tls` is for connections to other workers; vLLM makes none.
    """
    if settings.host_cache_gib or settings.disk_cache:
        name = "DISK_CACHE" if settings.disk_cache else "HOST_CACHE_GIB"
        raise StartupError(f"RYZANSTEIN_{name}: is the native engine's; vLLM offloads by kv_transfer_config")
    if find_spec("vllm") is None:
        raise StartupError(f"RYZANSTEIN_ENGINE vllm: vLLM is not installed; get it by: {INSTALL}")
    if folder.suffix == SUFFIX:
        raise StartupError(f"RYZANSTEIN_MODEL {folder}: the vllm engine serves folders of safetensors, no GGUF files")
    arguments = engine_arguments(settings, str(folder))
    clock = StartClock()
    clock.configure_logging(settings.log_level)
    config = await asyncio.to_thread(_configure, arguments, settings)
    from services.worker.vllm.async_llm import AsyncCore  # vLLM takes seconds to import

    try:
        model = await asyncio.to_thread(_model, config, folder, settings)
        sources = adapter_sources(settings, lambda: describe(folder), cache_bytes=0)
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error
    adapters = await named_adapters(settings, sources)
    model = replace(model, adapters=adapters, adapter_slots=sources.n_slots if sources else 0)
    rendezvous = NodeRendezvous(settings.nodes) if settings.nodes > 1 else None
    core = AsyncCore(arguments, settings.kv_tokens, clock, rendezvous)
    return VllmEngine(settings.recovery_limit_s, model, core, steps, life, sources)


def _configure(arguments: dict[str, Any], settings: WorkerSettings) -> Any:
    """Import vLLM and check the arguments in its own words; runs in a thread, because it takes seconds."""
    from services.worker.vllm.async_llm import configure

    try:
        return configure(arguments, settings.kv_tokens)
    except (TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        raise StartupError(f"RYZANSTEIN_ENGINE_ARGS: {describe_error(error, settings.engine_args)}") from error


def _model(config: Any, folder: Path, settings: WorkerSettings) -> EngineModel:
    """Facts about the model from vLLM's configuration and the folder's files."""
    served = config.model_config
    files = open_folder(folder, vocab_size=served.get_vocab_size()).require()
    dtype, kv = str(served.dtype).removeprefix("torch."), config.cache_config.cache_dtype
    kv_dtype = "" if kv in {"auto", dtype} else kv
    generates = served.runner_type == "generate"
    embedding = EmbeddingFiles() if generates else _embedding_files(files)
    return EngineModel(
        architecture=", ".join(served.architectures),
        dtype=dtype,
        device=config.device_config.device_type,
        tensor_parallel=config.parallel_config.world_size,
        # Apart from the native engine's: KV of one is no KV of the other.
        hash_root=":".join(filter(None, ("vllm", files.identity, dtype, served.quantization, kv_dtype))),
        tokenizer_json=files.tokenizer.json,
        chat_template=files.chat_template,
        special_tokens=files.tokenizer.special_tokens,
        add_bos_token=files.tokenizer.add_bos_token,
        eos_token_ids=files.eos_token_ids,
        sampling_defaults=named(files.sampling, override_sampling(settings.override_generation_config)),
        generates=generates,
        classes=None if generates else _classes(served, folder),
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
        kv_dtype=kv_dtype,
        engine="vllm",
        resume="approximate",
        pulls=False,
        images=_images(served, folder),
    )


def _images(served: Any, folder: Path) -> pb.ImageInput | None:
    """The images that the model takes; a pool whose images gateways cannot cut serves texts."""
    try:
        return images_taken(served, folder)
    except ModelError as error:
        log.warning("this worker serves texts alone: %s", error)
        return None


def _embedding_files(files: ModelFolder) -> EmbeddingFiles:
    """The files of sentence-transformers. Raises ModelError for what vLLM does not read in them."""
    file = files.path / NAMED
    if size := read_size(file, files.sentence_config):
        raise ModelError(
            f"{file}: truncate_dim: vLLM keeps all numbers of an embedding, not {size}: remove it, or use "
            "RYZANSTEIN_ENGINE native"
        )
    return files.embedding


def _classes(served: Any, folder: Path) -> pb.Classes | None:
    """The labels of a model that classifies texts, from its configuration with what the arguments change."""
    if not any(name.endswith("ForSequenceClassification") for name in served.architectures):
        return None
    values = json.loads(served.hf_config.to_json_string(use_diff=False))
    return classes_message(*read_classes(Config(values, folder / "config.json")))
