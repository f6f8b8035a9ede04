"""Makes the blocking clients from the asynchronous ones: ``python clients/python/build_sync.py``.

The build hook, make and the tests run it. mypy checks the modules that it writes as all others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent / "ryzanstein_client"
_RULES = (
    (r"^import grpc\.aio\n", ""),
    (r"\bgrpc\.aio\b", "grpc"),
    (r"\bAsyncGenerator\[(.+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b(async|await) ", ""),
    (r"\b(persist|collect)_async\b", r"\1"),
    (r"\ba(?=(close|closing|iter_bytes|read)\b)", ""),
    (r"\bfor asyncio(?=[.,])", "that blocks"),
    (r"\bbetween tasks\b", "between threads"),
)


def build_sync() -> None:
    """Write `client.py` next to each transport's `aio.py`."""
    for source in _PACKAGE.glob("*/aio.py"):
        text = source.read_text()
        for pattern, blocking in _RULES:
            text = re.sub(pattern, blocking, text, flags=re.MULTILINE)
        new = source.with_name(f"client.{os.getpid()}")  # replaced at once: other processes may read or write it
        new.write_text(f"# Made from aio.py by build_sync.py.\n{text}")
        new.replace(source.with_name("client.py"))


if __name__ == "__main__":
    build_sync()
