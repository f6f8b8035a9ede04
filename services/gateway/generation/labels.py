"""Scores of labels from the numbers of a classifier."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ryzanstein.v1 import worker_pb2


def label_scores(classes: worker_pb2.Classes, numbers: Sequence[float]) -> list[float]:
    """Return a score for each label by the publisher's function: a softmax, a sigmoid each, or the numbers."""
    if classes.function == worker_pb2.Classes.FUNCTION_IDENTITY:
        return list(numbers)
    if classes.function == worker_pb2.Classes.FUNCTION_SIGMOID:
        return [0.5 * (1 + math.tanh(number / 2)) for number in numbers]  # never overflows
    most = max(numbers)
    powers = [math.exp(number - most) for number in numbers]
    total = sum(powers)
    return [power / total for power in powers]
