"""Checks that the numbers of an adapter are numbers. Free of torch, because the server process also uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.compute.model.files import StoredEntry
from services.compute.model.spec import ModelError

_PIECE = 1 << 20  # numbers at a time
LARGEST = float(np.finfo(np.float32).max)  # the largest number in the dtype of adapters
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def check_finite(file: Path, tensors: Mapping[str, StoredEntry], scales: Mapping[str, float]) -> None:
    """Raise ModelError naming the first tensor that holds a number beyond float32, times its scale, or none at all."""
    try:
        stored = np.memmap(file, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error
    for name, entry in tensors.items():
        kind = np.dtype(_TYPES.get(entry.dtype, "<u2"))
        if entry.dtype not in _TYPES:
            continue
        for start in range(entry.start, entry.stop, _PIECE * kind.itemsize):
            numbers = stored[start : min(entry.stop, start + _PIECE * kind.itemsize)].view(kind)
            largest = float(np.abs(_as_floats(numbers, entry.dtype)).max())  # NaN, if one is
            if not largest * scales.get(name, 1.0) <= LARGEST:
                size = f"{largest:g}, times {scales[name]:g}," if scales.get(name, 1.0) != 1.0 else f"{largest:g}"
                raise ModelError(f"{file}: {name}: not all numbers are finite: it holds {size} beyond float32")


def _as_floats(numbers: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers  # type: ignore[return-value]
