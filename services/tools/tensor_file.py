"""Writes safetensors files with the permissions that other files get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a file of tensors; the library alone would permit its owner only."""
    handle = os.open(file, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        mode = os.fstat(handle).st_mode & 0o777  # as the umask leaves it
    finally:
        os.close(handle)
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(mode)
