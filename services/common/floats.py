"""Numbers that travel as float32."""

from __future__ import annotations

import numpy as np


def as_written(value: float) -> float:
    """The shortest decimal of the same float32: 0.7 for the double 0.699999988079071."""
    return float(str(np.float32(value)))
