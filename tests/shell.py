"""Commands as people run them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def captured(
    command: Sequence[str | Path], *, timeout: float = 300, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A command's output, as text, and its status."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=check, **options)
