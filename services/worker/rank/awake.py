"""The memory that a rank holds while it is awake, its release, and its rebuilding in the same process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.heap import freeze_started
from services.compute.backends.base import Memory, ParkingMemory
from services.compute.backends.parking import Restore
from services.compute.backends.zeros import Intake
from services.compute.model.footprint import Footprint
from services.compute.model.layers.head import Head
from services.compute.model.loading.folder import KnownFiles
from services.compute.model.spec import ModelError
from services.compute.sampling.grammar import Vocabulary, no_vocabulary
from services.worker.protocol.event_codec import ModelFacts
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.rank.block_copy import BlockCopier
from services.worker.rank.forward import Model
from services.worker.rank.images import Tower
from services.worker.rank.runner import Runner
from services.worker.rank.state_copy import StateCopier

logger = logging.getLogger(__name__)


def refuse_adapter(order: AdapterOrder) -> None:
    """Raise ModelError: this model has no room for adapters."""
    raise ModelError(f"{order.folder}: no slots for adapters")


def forget_none() -> None:
    """Do nothing: this model holds no adapters outside its slots."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder that is ready, and the factory of its KV cache."""

    decoder: Model[Any]
    facts: ModelFacts
    kv_bytes_per_token: int  # on one rank, summaries of blocks included
    make_cache: Callable[[int], Any]  # n_blocks -> cache
    footprint: Footprint  # predicted memory
    vocabulary: Vocabulary = no_vocabulary  # for grammars
    head: Head = ()  # layers over pooled states
    embeds: bool = False  # there are no logits
    files: KnownFiles | None = None  # files that a wake need not read again
    tower: Tower | None = None  # encodes frames of images; None: the model reads text only
    load_adapter: Callable[[AdapterOrder], None] = refuse_adapter  # into a slot; raises ModelError
    forget_adapters: Callable[[], None] = forget_none  # those in memory outside the slots


@dataclass(frozen=True, slots=True)
class Awake:
    """Executes plans and orders; nothing else refers to the model, the KV cache and the graphs."""

    model: LoadedModel
    runner: Runner[Any]
    copier: BlockCopier
    states: StateCopier
    intake: Intake = field(default_factory=Intake)  # takes the KV cache's memory after a wake


@dataclass(frozen=True, slots=True)
class _Parked:
    model: LoadedModel
    restore: Restore


@dataclass(slots=True)
class Sleeper:
    """An `Awake` that can be given back, and is built again with as many KV blocks."""

    _awake: Awake | None
    _rebuild: Callable[[LoadedModel | None], Awake]  # from the files without a model
    _memory: Memory
    # Called with the bytes that the process holds, and has yet to take, after every sleep and wake and while it takes.
    _hold: Callable[[int, int], None]
    _parked: _Parked | None = field(default=None, init=False)

    @property
    def awake(self) -> Awake:
        """The runner of plans and orders. The server sends none to a rank that is asleep."""
        assert self._awake is not None, "the rank is asleep"
        return self._awake

    def sleep(self, level: int) -> None:
        """Give the memory of weights, KV cache and graphs back. Does nothing while asleep.

        Level 1 keeps the weights as the kernels take them, a GPU's in the host's memory, a CPU's in a file. Without
        room for that, and at level 2, the wake reads the checkpoint again.
        """
        if self._awake is None:
            return
        memory = self._memory
        model = self._awake.model if level == 1 and isinstance(memory, ParkingMemory) else None
        self._awake = None
        if model is not None:
            model.decoder.forget_cache()
            model.forget_adapters()
        gc.unfreeze()  # a decoder and its graphs are a cycle
        gc.collect()
        if model is not None and isinstance(memory, ParkingMemory):
            try:
                self._parked = _Parked(model, memory.park())
            except OSError as error:
                logger.info("the wake will read the checkpoint again: %s", error)
                del model
                gc.collect()
        gc.freeze()  # the wake collects only what it makes
        memory.rest()
        self._hold(memory.held(), 0)

    def wake(self) -> None:
        """Bring the weights back and warm up. Does nothing while awake. Raises what a start raises.

        On CPUs the KV cache takes its memory afterwards, by `take`.
        """
        if self._awake is not None:
            return
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.restore()
        self._awake = self._rebuild(parked.model if parked else None)
        freeze_started()
        self._hold(self._memory.held(), self._awake.intake.left)

    @property
    def rest_s(self) -> float | None:
        """Seconds until the KV cache is due to take more memory; None: it has all, or the rank is asleep."""
        if self._awake is None or not self._awake.intake.left:
            return None
        return self._awake.intake.rest_s

    def take(self) -> None:
        """Take a page of the KV cache's memory. Raises OSError where the system has none."""
        intake = self.awake.intake
        intake.take()
        self._hold(self._memory.held(), intake.left)
