"""Interface of a format of quantized weights. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.compute.model.families.config import Config
from services.compute.model.layout import Layout


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantized linear layers; each file of `quantized/` has one as its `FORMAT`."""

    title: str
    quant_method: str  # its name in config.json
    read: Callable[[Config], Layout]  # reads the values of `quantization_config`; raises ModelError
    variants: tuple[str, ...] = ()  # values of `format`, which distinguish formats with the same `quant_method`
