"""Draws tokens on a group of any size from the logits of the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.base import Ops
from services.compute.backends.collectives import Communicator
from services.compute.backends.draws import Chances
from services.compute.backends.torch.ops import TorchOps
from services.compute.sampling.sampler import Draws, Sampler
from tests.unit.compute.sampling.thread_group import on_ranks

CPU = torch.device("cpu")
TORCH = TorchOps(torch.float32, CPU)


def chances(
    temperature: NDArray[np.float32],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    device: torch.device = CPU,
) -> Chances:
    numbers = (temperature, seeds.view(np.int64), positions)
    return Chances(*(torch.from_numpy(array).to(device) for array in numbers))


def admission(
    slot: int, params: Sampling, tokens: list[int], n_prompt: int
) -> tuple[int, Sampling, NDArray[np.int32], int]:
    """The arguments of a sampler's `admit`."""
    return slot, params, np.array(tokens, np.int32), n_prompt


def part_of(logits: torch.Tensor, comm: Communicator) -> torch.Tensor:
    width = logits.shape[1] // comm.size
    return logits[:, comm.rank * width : (comm.rank + 1) * width].clone()


def make_sampler(
    comm: Communicator, vocab: int, max_running: int, ops: Ops = TORCH, device: torch.device = CPU
) -> Sampler:
    width = vocab // comm.size
    return Sampler(
        comm,
        ops.logit_shard(comm.rank * width, width),
        vocab_local=width,
        max_running=max_running,
        device=device,
    )


def draw(
    logits: torch.Tensor,
    params: list[Sampling],
    *,
    known: list[list[int]] | None = None,
    n_prompt: int = 1,
    positions: NDArray[np.int64] | None = None,
    ranks: int = 1,
    ops: Ops = TORCH,
) -> Draws:
    """Draw one token per row of `logits` [n, vocab]; row i has `params[i]`. All ranks must agree."""
    n = len(params)
    known = known or [[0]] * n
    where = positions if positions is not None else np.array([len(tokens) for tokens in known])

    def body(comm: Communicator) -> Draws:
        sampler = make_sampler(comm, logits.shape[1], n, ops, logits.device)
        for slot in range(n):
            sampler.admit(*admission(slot, params[slot], known[slot], n_prompt))
        return sampler.draw(part_of(logits, comm), np.arange(n), where)

    first, *others = on_ranks(ranks, body)
    for other in others:
        assert np.array_equal(other.token_ids, first.token_ids)
        assert repr(other.logprobs) == repr(first.logprobs)  # NaN differs from itself
    return first
