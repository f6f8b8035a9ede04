"""How the numbers of a linear layer are stored: bits, groups and zero points. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Scheme:
    """Every number is (code - zero) * scale, with a scale and a zero for each group of inputs of an output."""

    bits: int  # 4 or 8
    group: int  # inputs that share a scale; 0: all inputs of an output
    symmetric: bool  # the zero is the middle code
    packed: bool = False  # in words also with 8 bits

    @property
    def levels(self) -> int:
        """The largest code; codes start at 0."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The code of 0 in a symmetric scheme, and the offset of signed codes."""
        return int(2 ** (self.bits - 1))

    @property
    def stored_as(self) -> str:
        """The `format` of compressed-tensors: a byte for each number, or words of several."""
        return "int-quantized" if self.bits == 8 and not self.packed else "pack-quantized"

    def bytes(self, n_out: int, n_in: int) -> int:
        """Bytes of a weight [n_out, n_in] with its scales and zeros."""
        n_groups = n_out * (n_in // self.group if self.group else 1)
        zeros = 0 if self.symmetric else n_groups * self.bits / 8
        return math.ceil(n_out * n_in * self.bits / 8 + n_groups * _SCALE_BYTES + zeros)

    def group_config(self, targets: list[str]) -> dict[str, Any]:
        """Return this scheme as a group of `quantization_config`; `targets`: names, patterns or classes of modules."""
        return {
            "format": self.stored_as,
            "targets": targets,
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": self.symmetric,
                "strategy": "group" if self.group else "channel",
                "group_size": self.group or None,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
