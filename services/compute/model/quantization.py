"""Which weights are rounded to integers while a checkpoint loads. Free of torch, because the server also uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.compute.ranks.config import Quantization

_GROUP = 32  # inputs that share a scale
_SCALE_BYTES = 2
# A router chooses between experts, where a small error changes the choice; positions are added, not multiplied.
# Filters of convolutions are as small as norms.
_KEPT = ("router", "positions", "filter", "rates")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Integers of `bits` bits, with a scale for each `group` inputs of an output."""

    bits: Literal[4, 8]
    group: int

    @property
    def element_bytes(self) -> float:
        """Bytes of an element in memory."""
        return self.bits / 8 + _SCALE_BYTES / self.group


EIGHT_BITS, FOUR_BITS = Rounding(8, _GROUP), Rounding(4, _GROUP)


def rounding_of(quantization: Quantization, key: str) -> Rounding | None:
    """Return how the unquantized weight `key` is rounded; None if it is not. Tables and heads keep 8 bits."""
    if quantization == "none" or key.rsplit(".", 1)[-1].startswith(_KEPT):
        return None
    return FOUR_BITS if quantization == "int4" and key.startswith("layers.") else EIGHT_BITS
