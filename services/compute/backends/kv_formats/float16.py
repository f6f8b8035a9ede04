"""Keys and values in float16."""

from __future__ import annotations

from services.compute.backends.kv_kinds import Plain

FORMAT = Plain("float16", 16)
