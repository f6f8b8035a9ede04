"""Ids of requests and of the objects that they create."""

from __future__ import annotations

import random


def new_id(prefix: str) -> str:
    """A unique id. It is not secret, so the process's random generator suffices."""
    return f"{prefix}-{random.getrandbits(96):024x}"
