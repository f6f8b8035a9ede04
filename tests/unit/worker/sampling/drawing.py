"""Draws tokens on a group of any size from the logits of the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.parallel.communicator import Communicator
from services.worker.sampling.sampler import Draws, Sampler
from services.worker.scheduling.plan import SamplingParams
from services.worker.transport.plan_codec import AdmissionView
from tests.unit.worker.sampling.thread_group import on_ranks


def admission(slot: int, params: SamplingParams, tokens: list[int], n_prompt: int) -> AdmissionView:
    return AdmissionView(slot, params, np.array(tokens, np.int32), n_prompt, False)


def part_of(logits: torch.Tensor, comm: Communicator) -> torch.Tensor:
    width = logits.shape[1] // comm.size
    return logits[:, comm.rank * width : (comm.rank + 1) * width].clone()


def make_sampler(comm: Communicator, vocab: int, max_slots: int, kernels: Bfloat16Kernels | None = None) -> Sampler:
    width = vocab // comm.size
    return Sampler(
        comm,
        vocab_start=comm.rank * width,
        vocab_local=width,
        max_slots=max_slots,
        device=torch.device("cpu"),
        kernels=kernels,
    )


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    known: list[list[int]] | None = None,
    n_prompt: int = 1,
    positions: NDArray[np.int64] | None = None,
    ranks: int = 1,
    kernels: Bfloat16Kernels | None = None,
) -> Draws:
    """Draw one token per row of `logits` [n, vocab]; row i has `params[i]`. All ranks must agree."""
    n = len(params)
    known = known or [[0]] * n
    where = positions if positions is not None else np.array([len(tokens) for tokens in known])

    def body(comm: Communicator) -> Draws:
        sampler = make_sampler(comm, logits.shape[1], n, kernels)
        for slot in range(n):
            sampler.admit(admission(slot, params[slot], known[slot], n_prompt))
        return sampler.draw(part_of(logits, comm), np.arange(n), where)

    first, *others = on_ranks(ranks, body)
    for other in others:
        assert np.array_equal(other.token_ids, first.token_ids)
        assert other.logprobs == first.logprobs
    return first
