"""What a format of quantized weights is: how its configuration is read. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.model.families.config import Config
from services.worker.model.layout import Layout


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store quantized linear layers, as `FORMAT` of a file of `quantized/`."""

    title: str
    quant_method: str  # what config.json calls it
    read: Callable[[Config], Layout]  # of the values below `quantization_config`; raises ModelError
    variants: tuple[str, ...] = ()  # values of `format`, where they tell formats with one `quant_method` apart
