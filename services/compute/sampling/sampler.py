"""Draws the next tokens from logits whose vocabulary is split over the ranks.

Every rank holds logits [n, vocab_local]. The ranks exchange one key per row, or some candidates for rows with
top-k, top-p or min-p. All ranks return the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling
from torch import Tensor

from services.compute.backends import keys
from services.compute.backends.base import LogitShard
from services.compute.backends.collectives import Communicator
from services.compute.backends.draws import Chances, DrawNumbers, DrawRows, FilterNumbers
from services.compute.backends.noise import row_words
from services.compute.sampling.bias import Biases, needs_bias
from services.compute.sampling.filters import Limits, draw_filtered, filter_rows, winners
from services.compute.sampling.grammar import Matchers, Vocabulary, no_vocabulary
from services.compute.sampling.logprobs import token_logprobs
from services.compute.sampling.penalties import TokenCounts
from services.compute.sampling.slots import SlotParams
from services.compute.token_logprobs import NO_TOKEN, TokenLogprobs

Slots = NDArray[np.int64]

_MOST_SORTED = 1 << 20  # keys of a step: a GPU sorts 8 rows of 128 K faster than the host answers, by estimate


@dataclass(frozen=True, slots=True)
class Draws:
    """The drawn tokens of n rows, and log-probabilities by slot where requested."""

    token_ids: NDArray[np.int64]  # [n]; `NO_TOKEN` where logits are not finite
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str] = field(default_factory=dict)  # by slot: why its grammar failed


class Sampler:
    """Keeps the sampling state of each slot and draws tokens."""

    def __init__(
        self,
        comm: Communicator,
        shard: LogitShard,
        *,
        vocab_local: int,
        max_running: int,
        device: torch.device,
        vocabulary: Vocabulary = no_vocabulary,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """The first grammar calls `vocabulary`."""
        self._comm, self._shard, self._vocab_local, self._device = comm, shard, vocab_local, device
        vocab_start = shard.first_id
        self._params = SlotParams(max_running)
        self._counts = TokenCounts(vocab_start, vocab_local)
        self._biases = Biases(vocab_start, vocab_local)
        self._matchers = Matchers(vocabulary, vocab_start, vocab_local, eos_token_ids)

    def admit(self, slot: int, sampling: Sampling, token_ids: NDArray[np.int32], n_prompt: int) -> None:
        """Set up a slot for a new request; the first `n_prompt` of `token_ids` are its prompt."""
        self.release(slot)
        self._params.set(slot, sampling, n_prompt)
        if self._params.penalised[slot]:
            self._counts.admit(slot, token_ids, n_prompt)
        if self._params.biased[slot]:
            self._biases.admit(slot, sampling)
        if self._params.constrained[slot]:
            self._matchers.admit(slot, sampling, token_ids[n_prompt:])

    def release(self, slot: int) -> None:
        """Remove the state of a slot's request."""
        self._counts.release(slot)
        self._biases.release(slot)
        self._matchers.release(slot)

    def numbers(self, slots: Slots, positions: NDArray[np.int64]) -> DrawNumbers | None:
        """Return what `slots` draw the tokens of `positions` by on the device; None if a draw needs the host.

        The host is needed for penalties, biases, grammars and log-probabilities, and for filters that would sort so
        much that waiting takes less time.
        """
        params = self._params
        if params.on_host[slots].any():
            return None
        temperature, seeds = params.temperature[slots], params.seed[slots].view(np.int64)
        rows = np.flatnonzero(params.filtered[slots])
        if not len(rows):
            return DrawNumbers(slots, temperature, seeds, positions)
        limited = slots[rows]
        filtered = FilterNumbers(rows, params.top_k[limited], params.top_p[limited], params.min_p[limited])
        if not filtered.width and len(rows) * self._vocab_local * self._comm.size > _MOST_SORTED:
            return None
        return DrawNumbers(slots, temperature, seeds, positions, filtered)

    def draw_on_device(self, logits: Tensor, draws: DrawRows) -> Tensor:
        """Draw one token per row of `logits` [n, vocab_local], which may be overwritten: [n] int64 on the device.

        A row whose logits are not finite draws `NO_TOKEN`.
        """
        limits, chances = draws.filtered, draws.chances
        if limits is None:
            return self._best(logits, chances)
        scaled = logits[limits.rows] / chances.temperature[limits.rows].unsqueeze(-1)
        words = row_words(chances.seeds[limits.rows], chances.positions[limits.rows])
        token_ids = self._best(logits, chances)
        return token_ids.index_copy(0, limits.rows, draw_filtered(self._comm, self._shard, scaled, words, limits))

    def _best(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the tokens with the best scores, [n] int64 on the device: greedy rows and rows without filters."""
        mine = self._shard.sample(logits, chances)
        best = mine if self._comm.size == 1 else self._comm.all_gather(mine).amax(dim=0)
        return keys.drawn_ids(best)

    def draw(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> Draws:
        """Draw one token per row of `logits` [n, vocab_local] float32, which may be overwritten.

        Row i belongs to `slots[i]` and draws the token of `positions[i]`.
        """
        params = self._params
        if params.plain[slots].all():
            return Draws(self._win(logits, slots, positions), {})
        wanted = np.flatnonzero(params.logprobs[slots] >= 0)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None  # a copy, before any change
        logits = self._adjust(logits, slots, positions)
        filtered = params.filtered[slots]
        token_ids = np.empty(len(slots), np.int64)
        for rows, pick in ((np.flatnonzero(~filtered), self._win), (np.flatnonzero(filtered), self._filter)):
            if len(rows):
                part = logits if len(rows) == len(slots) else logits[torch.from_numpy(rows)]
                token_ids[rows] = pick(part, slots[rows], positions[rows])
        self._count(slots, token_ids)
        failures = self._advance(slots, token_ids)
        if raw is None:
            return Draws(token_ids, {}, failures)
        n_top = params.logprobs[slots[wanted]].tolist()
        logprobs = self._logprobs(raw, slots[wanted].tolist(), token_ids[wanted], n_top)
        return Draws(token_ids, logprobs, failures)

    def needs_history(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which of `slots` [n] draw by the tokens before, or report log-probabilities by slot.

        Such a slot draws one row at a time. The draws of the others depend on their logits, seed and position alone.
        """
        return self._params.on_host[slots]

    def constrains(self, slots: Slots) -> bool:
        """Return whether any of `slots` [n] has a grammar."""
        return bool(self._params.constrained[slots].any())

    def forced(self, slot: int) -> tuple[int, ...]:
        """Return the tokens that the slot's grammar, if any, forces next."""
        return self._matchers.forced(slot) if self._params.constrained[slot] else ()

    def score_prompt(self, logits: Tensor, next_ids: NDArray[np.int64], n_top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of known tokens `next_ids` [n] under `logits` [n, vocab_local]."""
        tokens = torch.from_numpy(next_ids).to(self._device)
        return token_logprobs(self._comm, self._shard, logits, tokens, [n_top] * len(next_ids))

    def _logprobs(
        self, raw: Tensor, slots: list[int], token_ids: NDArray[np.int64], n_top: list[int]
    ) -> dict[int, TokenLogprobs]:
        tokens = torch.from_numpy(token_ids).to(self._device)
        logprobs = token_logprobs(self._comm, self._shard, raw, tokens, n_top)
        return dict(zip(slots, logprobs, strict=True))

    def _adjust(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> Tensor:
        """Apply penalties, bias, the ban of end tokens, and grammars."""
        penalised = np.flatnonzero(self._params.penalised[slots])
        if len(penalised):
            self._counts.penalise(logits, penalised, slots[penalised], self._params)
        biased = needs_bias(self._params, slots)
        if len(biased):
            early = positions[biased] < self._params.min_length[slots[biased]]
            self._biases.apply(logits, biased, slots[biased], early)
        constrained = np.flatnonzero(self._params.constrained[slots])
        if len(constrained):
            early = positions[constrained] < self._params.min_length[slots[constrained]]
            self._matchers.mask(logits, constrained, slots[constrained], early)
        return logits

    def _win(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return _to_host(self._best(logits, self._chances(slots, positions)))

    def _chances(self, slots: Slots, positions: NDArray[np.int64]) -> Chances:
        arrays = (self._params.temperature[slots], self._params.seed[slots].view(np.int64), positions)
        return Chances(*(torch.from_numpy(array).to(self._device) for array in arrays))

    def _filter(self, logits: Tensor, slots: Slots, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw for rows with top-k, top-p or min-p: the kept candidate with the best score."""
        params = self._params
        limits = Limits(params.top_k[slots], params.top_p[slots], params.min_p[slots])
        chances = self._chances(slots, positions)
        words, scaled = row_words(chances.seeds, chances.positions), logits / chances.temperature.unsqueeze(-1)
        token_ids = np.empty(len(slots), np.int64)
        for candidates in filter_rows(self._comm, self._shard, scaled, limits):
            at = torch.from_numpy(candidates.rows).to(self._device)
            best = winners(candidates.values, candidates.token_ids, candidates.allowed, words[at])
            token_ids[candidates.rows] = _to_host(keys.drawn_ids(best))
        return token_ids

    def _advance(self, slots: Slots, token_ids: NDArray[np.int64]) -> dict[int, str]:
        """Advance the matchers by the drawn tokens; returns failures by slot."""
        constrained = np.flatnonzero(self._params.constrained[slots] & (token_ids != NO_TOKEN))
        if not len(constrained):
            return {}
        return self._matchers.advance(slots[constrained].tolist(), token_ids[constrained].tolist())

    def _count(self, slots: Slots, token_ids: NDArray[np.int64]) -> None:
        penalised = np.flatnonzero(self._params.penalised[slots])
        if len(penalised):
            self._counts.count(slots[penalised].tolist(), token_ids[penalised])


def _to_host(token_ids: Tensor) -> NDArray[np.int64]:
    on_host: NDArray[np.int64] = token_ids.cpu().numpy()
    return on_host
