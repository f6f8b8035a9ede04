"""Opens the native engine of a model folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ryzanstein.v1 import worker_pb2 as pb

from services.common.attention import TOP_K, WINDOW, AttentionMode
from services.common.lifecycle import StartupError
from services.common.tls.credentials import Tls
from services.compute.backends.sizing import host_room
from services.compute.model.loading.folder import ModelFolder
from services.compute.model.loading.sampling import named, override_sampling
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.worker.adapters.opening import adapter_sources, named_adapters, pinned_refs
from services.worker.engine.base import LifeObserver, StepObserver
from services.worker.engine.state import EngineModel, classes_message
from services.worker.kv_transfer.copy_behind import CopyLimits
from services.worker.kv_transfer.neighbours import NeighbourLimits
from services.worker.native.config import EngineConfig
from services.worker.native.engine import NativeEngine
from services.worker.native.ranks import Ranks
from services.worker.native.startup import check_tiers, group_config, read_model, require_room, tier_sizes
from services.worker.process.rank_group import RankGroup
from services.worker.settings import WorkerSettings


async def open_native(
    settings: WorkerSettings,
    folder: Path,
    steps: StepObserver,
    life: LifeObserver,
    tls: Tls | None = None,
    make_ranks: Callable[[RankGroupConfig], Ranks] = RankGroup,
) -> NativeEngine:
    """Read all files but the weights and make the engine, whose `run` starts the ranks. Raises StartupError."""
    files = await asyncio.to_thread(read_model, folder)
    ranks = group_config(settings, files)
    require_room(settings, files.spec, ranks, host_room())
    check_tiers(settings, files.spec, ranks)
    config, model = await describe_engine(settings, files, ranks, tls)
    config = replace(config, tiers=tier_sizes(settings))
    return NativeEngine(config, model, make_ranks(ranks), steps, life)


async def describe_engine(
    settings: WorkerSettings, files: ModelFolder, ranks: RankGroupConfig, tls: Tls | None
) -> tuple[EngineConfig, EngineModel]:
    """The engine's configuration, and facts about the model. Raises StartupError."""
    config = EngineConfig(
        ranks,
        ranks.max_batched_tokens,
        settings.prefill_step_ms / 1e3,
        neighbour_limits(settings, tls),
        settings.recovery_limit_s,
        adapters=adapter_sources(settings, lambda: files.description, settings.adapter_cache_mb << 20),
    )
    adapters = await named_adapters(settings, config.adapters)
    modes = _attention_modes(files, ranks)
    model = replace(
        served_model(files, ranks),
        sampling_defaults=_sampling_defaults(files, settings),
        attention=_attention(settings, modes),
        attention_modes=modes,
        adapters=adapters,
        adapter_slots=ranks.adapter_slots,
    )
    return replace(config, pinned=pinned_refs(adapters)), model


def neighbour_limits(settings: WorkerSettings, tls: Tls | None) -> NeighbourLimits:
    """How KV blocks are exchanged with other workers."""
    copies = CopyLimits(settings.standby_tokens, settings.standby_mb_per_s * 1e6)
    return NeighbourLimits(settings.pull_mb_per_s * 1e6, copies, tls)


def _sampling_defaults(files: ModelFolder, settings: WorkerSettings) -> dict[str, float]:
    """The model's recommendations, with those of the settings over them. Raises StartupError."""
    try:
        return named(files.sampling, override_sampling(settings.override_generation_config))
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_OVERRIDE_GENERATION_CONFIG: {error}") from error


def _attention_modes(files: ModelFolder, ranks: RankGroupConfig) -> tuple[str, ...]:
    """The modes besides dense: none with scores by distance, without layers that attend, and without texts."""
    if files.spec.alibi_slopes or not files.spec.n_attending or not files.spec.generates:
        return ()
    return (WINDOW, TOP_K) if ranks.page_summaries else (WINDOW,)


def _attention(settings: WorkerSettings, modes: tuple[str, ...]) -> AttentionMode:
    """The attention of requests that name none. Raises StartupError."""
    mode = AttentionMode.parse(settings.attention)
    if mode != AttentionMode() and mode.name not in modes:
        raise StartupError(f"RYZANSTEIN_ATTENTION {mode}: this model attends {', '.join(('dense', *modes))}")
    return mode


def _images(files: ModelFolder) -> pb.ImageInput | None:
    vision, processing = files.spec.vision, files.images
    if vision is None or processing is None:
        return None
    return pb.ImageInput(
        layout=vision.layout,
        token=vision.image_token,
        frame_tokens=vision.frame_tokens,
        frame_size=vision.frame_size,
        cell=0 if vision.frame_size else vision.cell,
        least_pixels=processing.least_pixels,
        most_pixels=processing.most_pixels,
        longest_edge=processing.longest_edge,
        splits=processing.splits,
        resample=processing.resample,
    )


def served_model(files: ModelFolder, config: RankGroupConfig) -> EngineModel:
    """Facts about the model from its folder and the configuration."""
    # The hash root separates the KV of different models, dtypes, quantizations, rope choices and KV formats.
    rope = files.spec.rope_choice(config.max_model_len)
    rounded = "" if config.quantization == "none" else config.quantization
    classifier = files.spec.classifier
    return EngineModel(
        architecture=files.architecture,
        dtype=config.dtype,
        device=config.device,
        tensor_parallel=config.ranks,
        hash_root=":".join(filter(None, (files.identity, config.dtype, rounded, rope, config.kv_format))),
        tokenizer_json=files.tokenizer.json,
        chat_template=files.chat_template,
        special_tokens=files.tokenizer.special_tokens,
        add_bos_token=files.tokenizer.add_bos_token,
        eos_token_ids=files.eos_token_ids,
        sampling_defaults=named(files.sampling),
        generates=files.spec.generates,
        classes=classes_message(classifier.labels, classifier.function) if classifier else None,
        prompts=files.embedding.prompts,
        default_prompt=files.embedding.default_prompt,
        kv_dtype=config.kv_format,
        pulls=not config.has_state,
        images=_images(files),
    )
