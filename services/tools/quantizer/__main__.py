"""Quantizes a checkpoint: `python -m services.tools.quantizer REQUEST`, which `ryzanstein quantize` starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from services.compute.model.loading.hub import resolve_model
from services.compute.model.spec import ModelError
from services.tools.program import Progress, run
from services.tools.quantizer.run import QuantizationOptions, quantize


def quantize_model(request: dict[str, Any], progress: Progress) -> str:
    """Quantize by the fields of :class:`QuantizationOptions` and `device`; returns a note. Raises ModelError."""
    device = _device(request.pop("device"))
    request["model"] = resolve_model(request["model"])
    request["out"] = Path(request["out"]).absolute()
    request["calibration"] = Path(request["calibration"]) if request["calibration"] else None
    return quantize(QuantizationOptions(**request), device, progress)


def _device(name: str) -> torch.device:
    """Return the device; `auto` takes a GPU if there is one. Raises ModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: this machine has no usable CUDA device; allowed: auto, cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    sys.exit(run(quantize_model))
