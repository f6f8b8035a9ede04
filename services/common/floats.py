"""Numbers that travel as float32."""

from __future__ import annotations

import numpy as np


def as_written(value: float) -> float:
    """The shortest decimal that a float32 stands for: 0.7, where it is 0.699999988079071 as a double."""
    return float(str(np.float32(value)))
