"""Measures the share of communication in a decode step, and predicts the speedup of more ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import StepCommunicator
from services.compute.backends.opening import open_backend
from services.compute.ranks.config import RankGroupConfig
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.rank.loading import load
from services.worker.rank.runner import Runner

_WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Medians over decode steps of `batch` sequences on rank 0, in microseconds."""

    batch: int
    forward_us: float
    communication_us: float
    sample_us: float

    @property
    def step_us(self) -> float:
        """The whole step, without the wait for its plan."""
        return self.forward_us + self.communication_us + self.sample_us

    @property
    def share(self) -> float:
        """The share of communication in the step, within [0, 1)."""
        return self.communication_us / self.step_us


def predict_speedup(share: float, measured_ranks: int, ranks: int) -> float:
    """How many times faster a decode step is with `ranks` than with one rank, from one measured share.

    The unit is the step at N = `measured_ranks`: s = `share` of it is communication, 1 - s is compute. Compute is
    divided by the ranks; a one-shot all-reduce reads the buffers of n - 1 peers, so that its time grows with n - 1:

        T(n) = (1 - s) N / n  +  s (n - 1) / (N - 1)
        S(n) = T(1) / T(n)

    The prediction is optimistic about compute: it assumes a free core per rank, and counts replicated work (norms,
    scheduling) as divided. It is pessimistic about communication, since an all-reduce has a constant part.
    """
    if measured_ranks < 2:
        raise ValueError(f"one rank does not communicate: measure at 2 or more, not {measured_ranks}")
    n, base = ranks, measured_ranks
    step = (1 - share) * base / n + share * (n - 1) / (base - 1)
    return (1 - share) * base / step


def measure_decode(
    config: RankGroupConfig, comm: StepCommunicator, batch: int, prompt_tokens: int
) -> DecodeStep | None:
    """Prefill `batch` prompts, then decode to the model length of `config`.

    All ranks of the group call it; only rank 0 gets times.
    """
    backend = open_backend(getattr(torch, config.dtype), torch.device("cpu"))
    model = load(config, comm, backend)
    assert config.kv_tokens is not None
    n_blocks = -(-config.kv_tokens // config.block_tokens) + batch  # every sequence may end in a partial block
    runner = Runner(
        model.decoder,
        model.make_cache(n_blocks),
        comm,
        n_blocks=n_blocks,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        device=backend.device,
    )
    times = []
    for plan in decode_plans(batch, prompt_tokens, config.max_model_len - prompt_tokens - 1, config.block_tokens):
        result = runner.execute(plan)
        if result is not None:
            times.append(result.times)
    if not times:
        return None
    decode = times[1 + _WARM_UP_STEPS :]
    return DecodeStep(
        batch,
        statistics.median(t.forward for t in decode),
        statistics.median(t.communication for t in decode),
        statistics.median(t.sample for t in decode),
    )


def decode_plans(batch: int, prompt_tokens: int, steps: int, block_tokens: int) -> list[StepPlan]:
    """One step that prefills `batch` prompts in full, then `steps` decode steps, more than `_WARM_UP_STEPS`."""
    if steps <= _WARM_UP_STEPS:
        raise ValueError(f"{steps} decode steps are too few: the first {_WARM_UP_STEPS} are warm-up")
    per_slot = -(-(prompt_tokens + steps) // block_tokens)
    blocks = [tuple(range(1 + slot * per_slot, 1 + (slot + 1) * per_slot)) for slot in range(batch)]
    slots = range(batch)
    prompts = [tuple(1 + (7 * i + slot) % 97 for i in range(prompt_tokens)) for slot in slots]
    admissions = tuple(Admission(slot, Sampling(), prompts[slot], prompt_tokens) for slot in slots)
    prefill = tuple(Chunk(slot, 0, prompt_tokens, draws=True, new_blocks=blocks[slot]) for slot in slots)
    decode = [
        StepPlan(1 + i, chunks=tuple(Chunk(slot, prompt_tokens + i, 1, draws=True) for slot in slots))
        for i in range(steps)
    ]
    return [StepPlan(0, admissions=admissions, chunks=prefill), *decode]
