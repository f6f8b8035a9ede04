"""Names for requests and what they make."""

from __future__ import annotations

import random


def new_id(prefix: str) -> str:
    """A request id that no other gateway makes: unique, not secret, so the process's generator will do."""
    return f"{prefix}-{random.getrandbits(96):024x}"
