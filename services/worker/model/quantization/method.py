"""What a quantization method is: how its configuration is read. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.worker.model.families.config import Config
from services.worker.model.quantization.layout import Layout


@dataclass(frozen=True, slots=True)
class Method:
    """One way to store quantized linear layers, as `METHOD` of a file of `methods/`."""

    title: str
    quant_method: str  # what config.json calls it
    read: Callable[[Config], Layout]  # of the values below `quantization_config`; raises ModelError
    formats: tuple[str, ...] = ()  # values of `format`, where they tell methods with one `quant_method` apart
