"""Keys and values in float32."""

from __future__ import annotations

from services.compute.backends.kv_kinds import Plain

FORMAT = Plain("float32", 32)
