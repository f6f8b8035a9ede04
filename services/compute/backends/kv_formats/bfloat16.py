"""Keys and values in bfloat16."""

from __future__ import annotations

from services.compute.backends.kv_kinds import Plain

FORMAT = Plain("bfloat16", 16)
