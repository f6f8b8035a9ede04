"""The phases of a rank process: rendezvous, weights, KV cache, warm-up, steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from services.common.heap import freeze_started
from services.compute.backends.base import Backend, DeviceMemory, ModelBackend
from services.compute.backends.collectives import Communicator, StepCommunicator
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.opening import open_backend
from services.compute.backends.zeros import Intake, take_memory
from services.compute.model.loading.folder import KnownFiles
from services.compute.model.loading.pooling import Pooling
from services.compute.ranks.config import RankGroupConfig
from services.worker.protocol.event_codec import RankStarted, encode_event, encode_warming
from services.worker.rank.awake import Awake, LoadedModel, Sleeper
from services.worker.rank.block_copy import BlockCopier
from services.worker.rank.link import ServerLink
from services.worker.rank.loop import StepLoop
from services.worker.rank.memory import MemoryMeter
from services.worker.rank.rendezvous import join_group
from services.worker.rank.runner import Runner
from services.worker.rank.state_copy import StateCopier
from services.worker.rank.worst_step import (
    LOWER_STEP,
    LOWER_WEIGHTS,
    KvBudget,
    first_steps,
    naming_what_to_lower,
    worst_steps,
)

_WARM_UP_TOKENS = 64


# Returns this rank's share of a model, distributed and packed; with the files that an earlier load knows.
Loader = Callable[[RankGroupConfig, Communicator, ModelBackend, KnownFiles | None], LoadedModel]


class Phases:
    """Measures the phases of the start-up."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = dict(seconds)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the time of the `with` block as phase `name`."""
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def serve(link: ServerLink, config: RankGroupConfig, rank: int, phases: Phases, load: Loader) -> None:
    """Start up, report, and execute plans until the server's stop message. The caller reports exceptions."""
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", rank)
    dtype: torch.dtype = getattr(torch, config.dtype)
    with phases.measure("rendezvous"):
        kv_format = find_kv_format(config.kv_format) if config.kv_format else None
        backend = open_backend(
            dtype,
            device,
            kv_format,
            triton=config.gpu_kernels == "auto",
            graphs=config.gpu_graphs,
        )
        comm = join_group(link, config, rank, backend)
    if isinstance(backend.memory, DeviceMemory):
        backend.memory.pin(link.staging)  # once: wakes make new copiers
    build = Build(config, comm, backend, load, link.staging, partial(link.send, encode_warming()))
    awake, started = build.start(rank, phases)
    sleeper = Sleeper(awake, partial(build.again, started.n_blocks, awake.model.files), backend.memory, link.line.hold)
    del awake  # only the sleeper refers to the model
    freeze_started()  # otherwise a full garbage collection delays the streams by 0.1 s
    link.line.hold(backend.memory.held())
    link.send(encode_event(started))
    StepLoop(link, sleeper).run()


@dataclass(frozen=True, slots=True)
class Build:
    """Builds what serves: at the start, which sizes the KV cache, and after a sleep."""

    config: RankGroupConfig
    comm: StepCommunicator
    backend: Backend
    load: Loader
    staging: memoryview
    warming: Callable[[], None]  # called when the weights are loaded, before first steps

    def start(self, rank: int, phases: Phases) -> tuple[Awake, RankStarted]:
        """Load the model, size the KV cache and warm up. Raises ModelError, NotEnoughMemoryError."""
        config, backend = self.config, self.backend
        meter = MemoryMeter(backend.memory)
        with phases.measure("weights"):
            model = self._read()
        self.warming()
        loaded, budget = meter.growth(), None
        with phases.measure("kv_cache"), naming_what_to_lower("the KV cache and the largest step", LOWER_STEP):
            if config.device == "cuda" and config.caches and not model.embeds:
                budget = _measure_steps(config, model, self.comm, backend)
                left = self.comm.all_gather(torch.tensor([budget.left], device=backend.device))
                n_blocks = budget.n_blocks(config, config.block_tokens * model.kv_bytes_per_token, int(left.min()))
                backend.memory.release()  # the memory of the measured steps
            else:
                later = model.footprint.later
                n_blocks = meter.size_kv_cache(config, model.kv_bytes_per_token, later, self.comm, backend.device)
            awake = self._awaken(model, n_blocks, at_once=True)
        meter.growth()
        with phases.measure("warm_up"):
            self._warm_up(awake, n_blocks)
        predicted = model.footprint.on_rank((n_blocks + config.caches) * config.block_tokens)
        in_load = predicted.images + (predicted.adapters if config.device == "cuda" else 0)  # a GPU's slots are there
        account = replace(
            predicted,
            process=meter.process,
            weights=max(0, loaded - in_load),
            # On CPUs the warm-up is not the largest step.
            workspace=budget.workspace if budget else max(predicted.workspace, meter.growth()),
            graphs=budget.graphs if budget else 0,
        )
        return awake, RankStarted(
            rank,
            os.getpid(),
            phases.seconds,
            account,
            n_blocks,
            model.facts,
            kv_block_bytes=awake.copier.block_bytes,
            state_bytes=awake.states.row_bytes,
            snapshot_s=awake.states.measure(config.max_running),
        )

    def again(self, n_blocks: int, known: KnownFiles | None, model: LoadedModel | None) -> Awake:
        """Rebuild after a sleep, from the files without a `model`. Raises ModelError, NotEnoughMemoryError.

        `known`: by the start.
        """
        model = model or self._read(known)
        warms = self.config.device == "cuda"  # on CPUs a request that waits would wait for the warm-up as well
        if warms:
            self.warming()
        with naming_what_to_lower("the KV cache", LOWER_STEP):
            awake = self._awaken(model, n_blocks, at_once=False)
        if warms:
            self._warm_up(awake, n_blocks)
        return awake

    def _read(self, known: KnownFiles | None = None) -> LoadedModel:
        with naming_what_to_lower("the weights", LOWER_WEIGHTS):
            model = self.load(self.config, self.comm, self.backend, known)
            self.backend.memory.release()  # the memory of packing
        return model

    def _awaken(self, model: LoadedModel, n_blocks: int, *, at_once: bool) -> Awake:
        """Make what serves. On CPUs the KV cache takes its memory now, or by the intake."""
        cache, config = model.make_cache(n_blocks), self.config
        runner = _make_runner(config, model, cache, n_blocks, self.comm, self.backend)
        arrived = [cache.summarise] if config.page_summaries else []
        states = StateCopier(cache.states if config.has_state else None, self.staging)
        memory = (*cache.layers, *(cache.summaries if config.page_summaries else ()))
        if at_once:
            take_memory(memory)
        intake = Intake() if at_once else Intake(memory)
        return Awake(model, runner, BlockCopier(cache.layers, self.staging, *arrived), states, intake)

    def _warm_up(self, awake: Awake, n_blocks: int) -> None:
        """Compute first steps: kernels are compiled and steps captured before a request needs them."""
        config = self.config
        positions = n_blocks * config.block_tokens if config.caches else config.max_model_len
        with naming_what_to_lower("the first steps", LOWER_STEP):
            awake.runner.warm_up(max(1, min(_WARM_UP_TOKENS, min(positions, config.max_model_len) - 1)))
            if config.device == "cuda" and config.caches and not awake.model.embeds:
                awake.runner.rehearse(first_steps(config, self.backend.replayed_rows))


def _measure_steps(config: RankGroupConfig, model: LoadedModel, comm: StepCommunicator, backend: Backend) -> KvBudget:
    """Compute the worst steps in a cache of one block, which is freed again."""
    assert isinstance(backend.memory, DeviceMemory), "a GPU reports its memory"
    cache_bytes = 2 * config.block_tokens * model.kv_bytes_per_token  # a block and the null block
    runner = _make_runner(config, model, model.make_cache(1), 1, comm, backend)

    def steps() -> None:
        between = None  # a frame between two layers of the tower
        if model.tower is not None:
            pixels = torch.zeros(config.frame_bytes, dtype=torch.uint8)
            between = model.tower(pixels, 0, min(1, model.tower.n_layers - 1), 1)
            model.tower(pixels, 0, model.tower.n_layers, 1)
        runner.rehearse(worst_steps(config, backend.replayed_rows))
        del between

    return KvBudget.measured(backend.memory, steps, cache_bytes, config.gpu_memory_utilization)


def _make_runner(
    config: RankGroupConfig,
    model: LoadedModel,
    cache: Any,
    n_blocks: int,
    comm: StepCommunicator,
    backend: Backend,
) -> Runner[Any]:
    return Runner(
        model.decoder,
        cache,
        comm,
        n_blocks=n_blocks,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        pooling=Pooling(config.pooling, config.normalise_embeddings, size=config.embedding_size),
        head=model.head,
        embeds=model.embeds,
        device=backend.device,
        vocabulary=model.vocabulary,
        eos_token_ids=config.eos_token_ids,
        transfers=backend.transfers,
        overlaps=config.overlaps,
        speculates=config.speculation,
        states=cache.states if config.has_state else None,
        tower=model.tower,
    )
