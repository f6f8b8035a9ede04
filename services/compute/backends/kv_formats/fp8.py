"""Keys and values in 8-bit floats (e4m3) with a bfloat16 scale for each token and head, for GPUs."""

from __future__ import annotations

from services.compute.backends.kv_kinds import Coded

FORMAT = Coded("fp8", "float8_e4m3fn", 8, 448.0)
