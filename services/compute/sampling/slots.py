"""The sampling parameters of all slots as arrays, which a step indexes by its slots."""

from __future__ import annotations

import numpy as np
from ryzanstein.v1.worker_pb2 import Sampling

MIN_TEMPERATURE = 1e-5  # a lower temperature is greedy, because scaled logits would exceed float32's range


class SlotParams:
    """Arrays indexed by slot, [max_running] each."""

    def __init__(self, max_running: int) -> None:
        self.temperature = np.zeros(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)
        self.top_p = np.ones(max_running, np.float64)
        self.min_p = np.zeros(max_running, np.float64)
        self.repetition = np.ones(max_running, np.float32)
        self.presence = np.zeros(max_running, np.float32)
        self.frequency = np.zeros(max_running, np.float32)
        self.seed = np.zeros(max_running, np.uint64)
        self.min_length = np.zeros(max_running, np.int64)  # position below which no end token may be drawn
        self.logprobs = np.full(max_running, -1, np.int64)  # -1: none
        self.filtered = np.zeros(max_running, np.bool_)
        self.penalised = np.zeros(max_running, np.bool_)
        self.biased = np.zeros(max_running, np.bool_)
        self.constrained = np.zeros(max_running, np.bool_)  # by a grammar
        self.on_host = np.zeros(max_running, np.bool_)  # any of the three above, or logprobs: needs the host
        self.plain = np.zeros(max_running, np.bool_)  # neither filtered nor on the host

    def set(self, slot: int, sampling: Sampling, n_prompt: int) -> None:
        """Set the parameters of `slot`; worker.proto defines their meaning."""
        temperature = sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0
        top_p, repetition = sampling.top_p or 1.0, sampling.repetition_penalty or 1.0
        self.temperature[slot], self.top_k[slot] = temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = top_p, sampling.min_p
        self.repetition[slot] = repetition
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.seed[slot] = sampling.seed
        self.min_length[slot] = n_prompt + sampling.min_tokens
        scored = sampling.HasField("logprobs")
        self.logprobs[slot] = sampling.logprobs if scored else -1
        filtered = temperature > 0 and (sampling.top_k > 0 or top_p < 1.0 or sampling.min_p > 0.0)
        penalised = repetition != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        biased = bool(sampling.logit_bias) or sampling.min_tokens > 0
        constrained = bool(sampling.grammar)
        self.filtered[slot], self.penalised[slot] = filtered, penalised
        self.biased[slot], self.constrained[slot] = biased, constrained
        self.on_host[slot] = penalised or biased or constrained or scored
        self.plain[slot] = not (filtered or self.on_host[slot])
