"""Keys and values in int8 with a bfloat16 scale for each token and head: 8.25 bits per number with heads of 64."""

from __future__ import annotations

from services.compute.backends.kv_kinds import Coded

FORMAT = Coded("int8", "int8", 8, 127.0)
