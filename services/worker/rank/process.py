"""The phases of a rank process: rendezvous, weights, KV cache, warm-up, steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from services.common.heap import freeze_started
from services.compute.backends.base import Backend, DeviceMemory, ModelBackend
from services.compute.backends.collectives import Communicator, StepCommunicator
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.opening import open_backend
from services.compute.model.footprint import Footprint
from services.compute.model.layers.head import Head
from services.compute.model.loading.pooling import Pooling
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.compute.sampling.grammar import Vocabulary, no_vocabulary
from services.worker.protocol.event_codec import ModelFacts, RankStarted, encode_event
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.rank.block_copy import BlockCopier
from services.worker.rank.forward import Model
from services.worker.rank.link import ServerLink
from services.worker.rank.loop import StepLoop
from services.worker.rank.memory import MemoryMeter
from services.worker.rank.rendezvous import join_group
from services.worker.rank.runner import Runner
from services.worker.rank.worst_step import (
    LOWER_STEP,
    LOWER_WEIGHTS,
    KvBudget,
    first_steps,
    naming_what_to_lower,
    worst_steps,
)

_WARM_UP_TOKENS = 64


def refuse_adapter(order: AdapterOrder) -> None:
    """Raise ModelError: this model has no room for adapters."""
    raise ModelError(f"{order.folder}: no slots for adapters")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder that is ready, and the factory of its KV cache."""

    decoder: Model[Any]
    facts: ModelFacts
    kv_bytes_per_token: int  # on one rank
    make_cache: Callable[[int], Any]  # n_blocks -> cache
    footprint: Footprint  # predicted memory
    vocabulary: Vocabulary = no_vocabulary  # for grammars
    head: Head = ()  # layers over pooled states
    embeds: bool = False  # there are no logits
    load_adapter: Callable[[AdapterOrder], None] = refuse_adapter  # into a slot; raises ModelError


class Loader(Protocol):
    """Reads this rank's share of a model."""

    def __call__(self, config: RankGroupConfig, comm: Communicator, backend: ModelBackend) -> LoadedModel:
        """Return the model, distributed and packed."""
        ...


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
    meter = MemoryMeter(backend.memory)
    with phases.measure("weights"), naming_what_to_lower("the weights", LOWER_WEIGHTS):
        model = load(config, comm, backend)
        backend.memory.release()  # what was needed only while weights were packed
    weights, budget = meter.growth(), None
    with phases.measure("kv_cache"), naming_what_to_lower("the KV cache and the largest step", LOWER_STEP):
        if config.device == "cuda" and config.caches and not model.embeds:
            budget = _measure_steps(config, model, comm, backend)
            left = comm.all_gather(torch.tensor([budget.left], device=device))
            n_blocks = budget.n_blocks(config, config.block_tokens * model.kv_bytes_per_token, int(left.min()))
            backend.memory.release()  # what only the measured steps needed
        else:
            n_blocks = meter.size_kv_cache(config, model.kv_bytes_per_token, model.footprint.later, comm, device)
        cache = model.make_cache(n_blocks)
    runner = _make_runner(config, model, cache, n_blocks, comm, backend)
    meter.growth()
    with phases.measure("warm_up"), naming_what_to_lower("the first steps", LOWER_STEP):
        positions = n_blocks * config.block_tokens if config.caches else config.max_model_len
        runner.warm_up(max(1, min(_WARM_UP_TOKENS, min(positions, config.max_model_len) - 1)))
        if budget is not None:  # kernels are compiled and steps captured before a request needs them
            runner.rehearse(first_steps(config, backend.replayed_rows))
    kv_bytes = (n_blocks + config.caches) * config.block_tokens * model.kv_bytes_per_token
    computed = model.footprint.rank_total(n_blocks * config.block_tokens)
    workspace, graphs = (budget.workspace, budget.graphs) if budget else (meter.growth(), 0)
    ledger = meter.ledger(weights, workspace, kv_bytes, computed, config.ranks, graphs)
    block_bytes = config.block_tokens * model.kv_bytes_per_token
    started = RankStarted(rank, os.getpid(), phases.seconds, ledger, n_blocks, model.facts, block_bytes)
    freeze_started()  # otherwise a full garbage collection delays the streams by 0.1 s
    link.send(encode_event(started))
    StepLoop(link, runner, BlockCopier(cache.layers, link.staging), model.load_adapter).run()


def _measure_steps(config: RankGroupConfig, model: LoadedModel, comm: StepCommunicator, backend: Backend) -> KvBudget:
    """Compute the worst steps in a cache of one block, which is freed again."""
    assert isinstance(backend.memory, DeviceMemory), "a GPU reports its memory"
    cache_bytes = 2 * config.block_tokens * model.kv_bytes_per_token  # a block and the null block
    runner = _make_runner(config, model, model.make_cache(1), 1, comm, backend)
    steps = partial(runner.rehearse, worst_steps(config, backend.replayed_rows))
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
    )
