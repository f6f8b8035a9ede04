"""How a job trains: its hyperparameters with `auto` resolved, and what each step computes.

All of it follows from the job alone, so that a process that resumes does what the one before would have done.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.fine_tuning.records import Order

_LEARNING_RATE = 2e-4  # usual for LoRA with Adam
_WARMUP = 0.05  # share of all steps
_FEW = 100  # with fewer examples, `auto` takes more epochs


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The steps of a job."""

    n_examples: int
    n_epochs: int
    batch_size: int
    learning_rate: float
    seed: int

    @classmethod
    def of(cls, order: Order, n_examples: int) -> TrainingPlan:
        """Resolve `auto` by the number of examples, as OpenAI describes it: small files get more epochs."""
        epochs = max(3, min(25, _FEW // n_examples)) if order.n_epochs == "auto" else order.n_epochs
        batch = max(1, min(8, n_examples // 16)) if order.batch_size == "auto" else order.batch_size
        multiplier = 1.0 if order.learning_rate_multiplier == "auto" else order.learning_rate_multiplier
        return cls(n_examples, epochs, min(batch, n_examples), _LEARNING_RATE * multiplier, order.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last one may be smaller."""
        return math.ceil(self.n_examples / self.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole job."""
        return self.n_epochs * self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Examples of a step, which counts from 0; every epoch has an order of its own."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = list(range(self.n_examples))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def rate(self, step: int) -> float:
        """The learning rate of a step: it rises for the first steps, then falls along a cosine."""
        warmup = max(1, round(_WARMUP * self.steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ends with this step."""
        return (step + 1) % self.steps_per_epoch == 0


def groups(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split examples into groups whose padded size is at most `max_tokens`, long ones first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
