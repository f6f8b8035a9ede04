"""Executes plans on one rank: applies a plan, computes its rows, draws tokens. It knows no processes or transport.

A step has two halves. `launch` applies the plan and starts its computations; `finish` waits for the tokens. With
`overlaps`, a step may be launched before the tokens of the step before it are read: it finds them on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling
from torch import Tensor

from services.compute.backends.collectives import StepCommunicator
from services.compute.backends.states import StateStore
from services.compute.backends.transfers import DirectTransfers, Pending, Transfers
from services.compute.model.layers.head import Head
from services.compute.model.loading.pooling import Pooling
from services.compute.sampling.grammar import Vocabulary, no_vocabulary
from services.compute.sampling.sampler import Draws, Sampler
from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.plan import (
    Admission,
    Chunk,
    SlotResult,
    StepPlan,
    StepResult,
    StepTimes,
)
from services.worker.protocol.plan_codec import PlanView, view_plan
from services.worker.rank.acceptor import Acceptor
from services.worker.rank.batching import BatchLayout, DrawingRows, lay_out
from services.worker.rank.drawn import DrawnTokens
from services.worker.rank.forward import Forward, Model
from services.worker.rank.images import SlotImages, Tower
from services.worker.rank.places import SlotPlaces
from services.worker.rank.pooling import PooledSlots
from services.worker.rank.slot_table import SlotTable

Ints = NDArray[np.int64]
Cache = TypeVar("Cache")

_SCORED_ROWS = 64  # most prompt rows whose logits are in memory at one time


@dataclass(frozen=True, slots=True)
class Computing:
    """The computations of a step."""

    hidden: Tensor | None  # states of the rows that draw, or with `every_row` of all; None: the tokens are drawn
    layout: BatchLayout
    drawing: DrawingRows
    every_row: bool
    drawn: Pending | None  # tokens; None: `finish` draws
    times: StepTimes  # times of the first half


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is not finished."""

    step: int
    wait_us: int
    computing: Computing | None  # None: the step had no rows

    @property
    def awaited(self) -> bool:
        """Whether only the reading of its tokens is left, so that another step may be launched before that."""
        return self.computing is not None and self.computing.drawn is not None

    def arrived(self) -> bool:
        """Whether `finish` would not wait."""
        drawn = self.computing.drawn if self.computing else None
        return drawn is None or drawn.arrived()


class Runner(Generic[Cache]):
    """Executes plans in order. Every rank of a group has a runner, which executes the same plans."""

    def __init__(
        self,
        decoder: Model[Cache],
        cache: Cache,
        comm: StepCommunicator,
        *,
        n_blocks: int,
        block_tokens: int,
        max_running: int,
        max_model_len: int,
        device: torch.device,
        pooling: Pooling | None = None,
        head: Head = (),
        embeds: bool = False,
        vocabulary: Vocabulary = no_vocabulary,
        eos_token_ids: Sequence[int] = (),
        transfers: Transfers | None = None,
        overlaps: bool = False,
        speculates: bool = False,
        states: StateStore | None = None,
        tower: Tower | None = None,
    ) -> None:
        """`head`: layers over pooled states. `embeds`: the model has no logits. `n_blocks` 0: nothing is cached.

        `overlaps`: draw on the device, so that another step may be launched before the tokens are read.
        `speculates`: results name the tokens that grammars force next. `states`: of slots and snapshots; None without.
        `tower`: encodes frames of images.
        """
        self._embeds, self._states = embeds, states
        self._decoder, self._comm, self._device = decoder, comm, device
        transfers = transfers or DirectTransfers(device)
        self._table = SlotTable(max_running, max_model_len, block_tokens, n_blocks)
        self._pools = PooledSlots(pooling or Pooling(), head)
        self._images = SlotImages(tower)
        self._places = SlotPlaces() if tower is not None and tower.places else None
        self._prompt_logprobs: dict[int, int] = {}  # slot -> number of top tokens
        self._sampler = Sampler(
            comm,
            decoder.logit_shard,
            vocab_local=decoder.vocab_local,
            max_running=max_running,
            device=device,
            vocabulary=vocabulary,
            eos_token_ids=eos_token_ids,
        )
        self._acceptor = Acceptor(self._sampler, self._table, device, forces=speculates)
        self._drawn = DrawnTokens(self._table, self._sampler, transfers, device) if overlaps else None
        self._forward = Forward(decoder, cache, transfers, self._drawn)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; only rank 0 returns a result. Raises MalformedPlanError."""
        return self.step(view_plan(plan))

    @torch.inference_mode()
    def step(self, plan: PlanView, wait_us: int = 0) -> StepResult | None:
        """Like `execute`, for a plan in columns; `wait_us` is the time that the rank waited for the plan."""
        self._comm.begin_step(plan.step)
        return self._finish(self._launch(plan, wait_us))

    @torch.inference_mode()
    def launch(self, plan: PlanView, wait_us: int = 0) -> Launched:
        """Apply a plan and start its computations. The step before must be finished unless it is only awaited."""
        self._comm.begin_step(plan.step)
        return self._launch(plan, wait_us)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> StepResult | None:
        """Wait for a step's tokens, or draw them; only rank 0 returns a result."""
        return self._finish(launched)

    @torch.inference_mode()
    def warm_up(self, n_tokens: int) -> None:
        """Compute a prompt of `n_tokens` and a decode step, so that set-up does not delay the first requests.

        A model without logits computes an embedding.
        """
        if self._embeds:
            self._warm_up_embedding(n_tokens)
            return
        n_blocks = -(-(n_tokens + 1) // self._table.block_tokens)
        admission = Admission(0, Sampling(temperature=1.0), (0,) * n_tokens, n_prompt=n_tokens)
        prefill = Chunk(0, 0, n_tokens, draws=True, new_blocks=tuple(range(1, n_blocks + 1)))
        decode = Chunk(0, n_tokens, 1, draws=True)
        plans = (
            StepPlan(0, admissions=(admission,), chunks=(prefill,)),
            StepPlan(0, chunks=(decode,)),
            StepPlan(0, released=(0,)),
        )
        self.rehearse(plans)

    @torch.inference_mode()
    def rehearse(self, plans: Iterable[StepPlan]) -> None:
        """Compute steps of no request."""
        for plan in plans:
            self._finish(self._launch(view_plan(plan)))

    def _warm_up_embedding(self, n_tokens: int) -> None:
        n_blocks = -(-n_tokens // self._table.block_tokens) if self._table.n_blocks else 0
        admission = Admission(0, Sampling(), (0,) * n_tokens, n_prompt=n_tokens, embed=True)
        chunk = Chunk(0, 0, n_tokens, draws=True, new_blocks=tuple(range(1, n_blocks + 1)))
        self.rehearse((StepPlan(0, admissions=(admission,), chunks=(chunk,)), StepPlan(0, released=(0,))))

    def _launch(self, plan: PlanView, wait_us: int = 0) -> Launched:
        began = time.perf_counter_ns()
        self._apply(plan)
        if not len(plan.slots):
            return Launched(plan.step, wait_us, None)
        exact = self._decoder.exact_chunks
        numbers, layout = lay_out(self._table, plan, exact_chunks=exact, has_state=self._states is not None)
        if (images := self._images.rows(layout)) is not None:
            numbers = replace(numbers, images=images)
        if self._places is not None:
            numbers = self._places.placed(numbers, layout)
        drawing = layout.drawing(self._drawing_sequences(layout))
        every_row = bool(self._prompt_logprobs) or self._pools.any()
        # Proposals are verified on the host.
        drawn = None if every_row or len(plan.proposals) else self._forward.draw(numbers, drawing)
        hidden = None
        if drawn is None:
            hidden = self._forward.states(numbers, None if every_row else drawing.rows.tolist())
        communication = self._comm.take_elapsed_us()
        forward = (time.perf_counter_ns() - began) // 1000 - communication
        times = StepTimes(wait=wait_us, forward=forward, communication=communication)
        return Launched(plan.step, wait_us, Computing(hidden, layout, drawing, every_row, drawn, times))

    def _finish(self, launched: Launched) -> StepResult | None:
        began, step = time.perf_counter_ns(), launched.computing
        if step is None:
            return StepResult(launched.step, times=StepTimes(wait=launched.wait_us)) if self._comm.rank == 0 else None
        drawing, hidden = step.drawing, step.hidden
        if self._drawn is not None and step.drawn is not None:
            slots = self._acceptor.results(drawing.slots, Draws(self._drawn.read(step.drawn, drawing), {}))
        else:
            assert hidden is not None
            read = [*self._score_prompts(hidden, step.layout), *self._pool(hidden, step.layout)]
            if step.every_row:
                hidden = hidden[torch.from_numpy(drawing.rows).to(self._device)]
            slots = _merged(self._draw(hidden, drawing), read)
        if self._comm.rank != 0:
            return None
        communication, forward = self._comm.take_elapsed_us(), step.times
        sample = (time.perf_counter_ns() - began) // 1000 - communication
        times = StepTimes(forward.wait, forward.forward, forward.communication + communication, sample)
        return StepResult(launched.step, slots, times)

    def _apply(self, plan: PlanView) -> None:
        self._table.release(plan.released)
        for slot in plan.released.tolist():
            self._forget(slot)
        for admission in plan.admissions:
            self._table.admit(admission)
            self._forget(admission.slot)
            if self._states is not None and admission.restore >= 0:
                self._states.copy(admission.restore, admission.slot)
            self._sampler.admit(admission.slot, admission.sampling, admission.token_ids, admission.n_prompt)
            if self._places is not None:
                self._places.admit(admission.slot, admission.spans)
            if admission.embed:
                self._pools.admit(admission.slot)
            if admission.sampling.HasField("prompt_logprobs"):
                self._prompt_logprobs[admission.slot] = admission.sampling.prompt_logprobs
        self._images.encode(plan.tower)
        self._table.extend(plan)

    def _forget(self, slot: int) -> None:
        self._sampler.release(slot)
        self._pools.release(slot)
        self._images.release(slot)
        if self._places is not None:
            self._places.release(slot)
        self._prompt_logprobs.pop(slot, None)

    def _drawing_sequences(self, layout: BatchLayout) -> Ints:
        """Return the sequences that draw tokens; pooled sequences never do."""
        rows = np.flatnonzero(layout.draws)
        if not self._pools.any():
            return rows
        return np.array([row for row in rows if not self._pools.holds(int(layout.slots[row]))], np.int64)

    def _draw(self, hidden: Tensor, drawing: DrawingRows) -> tuple[SlotResult, ...]:
        """Draw the tokens that follow the rows `drawing`, with hidden states `hidden`, and store them in the table."""
        return self._acceptor.draw(self._decoder.logits(hidden), drawing) if len(drawing.rows) else ()

    def _score_prompts(self, hidden: Tensor, layout: BatchLayout) -> Iterator[SlotResult]:
        """Yield the log-probabilities of the prompt tokens that follow this step's rows."""
        if not self._prompt_logprobs:
            return
        for index, slot in enumerate(layout.slots.tolist()):
            n_top = self._prompt_logprobs.get(slot)
            start = int(layout.starts[index])
            end = min(int(layout.ends[index]), int(self._table.n_prompt[slot]) - 1)
            if n_top is not None and start < end:
                first_row = int(layout.row_ends[index] - (layout.ends[index] - layout.starts[index]))
                rows = hidden[first_row : first_row + end - start]
                following = self._table.token_ids[slot, start + 1 : end + 1].astype(np.int64)
                yield SlotResult(slot, prompt_logprobs=self._score(rows, following, n_top))

    def _score(self, hidden: Tensor, following: Ints, n_top: int) -> tuple[TokenLogprobs, ...]:
        scores: list[TokenLogprobs] = []
        for low in range(0, len(following), _SCORED_ROWS):
            part = slice(low, low + _SCORED_ROWS)
            logits = self._decoder.logits(hidden[part])  # [n, vocab_local]
            scores.extend(self._sampler.score_prompt(logits, following[part], n_top))
        return tuple(scores)

    def _pool(self, hidden: Tensor, layout: BatchLayout) -> Iterator[SlotResult]:
        """Add to the pooled slots; yield the embeddings of the slots whose last token was computed."""
        if not self._pools.any():
            return
        for index, slot in enumerate(layout.slots.tolist()):
            if not self._pools.holds(slot):
                continue
            start, end, row_end = layout.starts[index], layout.ends[index], layout.row_ends[index]
            self._pools.add(slot, int(start), hidden[row_end - (end - start) : row_end])
            if end == self._table.n_known[slot]:
                yield SlotResult(slot, pooled=self._pools.result(slot))


def _merged(drawn: tuple[SlotResult, ...], read: Sequence[SlotResult]) -> tuple[SlotResult, ...]:
    """Return one record for each slot; a prompt is scored in the step that draws its first token."""
    if not read:
        return drawn
    results = {result.slot: result for result in read}
    for result in drawn:
        scored = results.get(result.slot)
        results[result.slot] = result._replace(prompt_logprobs=scored.prompt_logprobs) if scored else result
    return tuple(results.values())
