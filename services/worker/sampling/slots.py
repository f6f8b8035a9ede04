"""The sampling parameters of all slots, in columns, so that a step reads them by one index."""

from __future__ import annotations

import numpy as np

from services.worker.protocol.plan import SamplingParams


class SlotParams:
    """Arrays indexed by slot, [max_slots] each."""

    def __init__(self, max_slots: int) -> None:
        self.temperature = np.zeros(max_slots, np.float32)
        self.top_k = np.zeros(max_slots, np.int64)
        self.top_p = np.ones(max_slots, np.float64)
        self.min_p = np.zeros(max_slots, np.float64)
        self.repetition = np.ones(max_slots, np.float32)
        self.presence = np.zeros(max_slots, np.float32)
        self.frequency = np.zeros(max_slots, np.float32)
        self.seed = np.zeros(max_slots, np.uint64)
        self.min_length = np.zeros(max_slots, np.int64)  # position below which no end token may be drawn
        self.logprobs = np.full(max_slots, -1, np.int64)  # -1: none
        self.filtered = np.zeros(max_slots, np.bool_)
        self.penalised = np.zeros(max_slots, np.bool_)
        self.biased = np.zeros(max_slots, np.bool_)
        self.constrained = np.zeros(max_slots, np.bool_)  # by a grammar
        self.plain = np.zeros(max_slots, np.bool_)  # none of these four, and no logprobs

    def set(self, slot: int, params: SamplingParams, n_prompt: int) -> None:
        """Give `slot` its parameters."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.min_length[slot] = n_prompt + params.min_tokens
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.filtered[slot] = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self.penalised[slot] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.biased[slot] = bool(params.logit_bias) or params.min_tokens > 0
        self.constrained[slot] = bool(params.grammar)
        special = self.filtered[slot] or self.penalised[slot] or self.biased[slot] or self.constrained[slot]
        self.plain[slot] = not special and params.logprobs is None
