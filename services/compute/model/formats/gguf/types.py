"""The tensor types of GGUF: their numbers in files, the sizes of their blocks and of their numbers in memory.

Free of torch.

Source: `ggml_type` and the block structures of ggml (ggml.h, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's elements are stored in blocks of `block` neighbours of a row, `n_bytes` each."""

    name: str
    block: int
    n_bytes: int
    kept_bits: float = 0  # bits of an element kept as an integer, with its share of scales; 0: not kept as one


# Kept are codes of 2, 4 or 8 bits; a scale, and an offset if there is one, for each group: in 16 bits if that is always
# exact.
TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18, 4 + 16 / 32),
    3: TensorType("Q4_1", 32, 20, 4 + 64 / 32),
    6: TensorType("Q5_0", 32, 22, 8 + 16 / 32),
    7: TensorType("Q5_1", 32, 24, 8 + 32 / 32),
    8: TensorType("Q8_0", 32, 34, 8 + 16 / 32),
    10: TensorType("Q2_K", 256, 84, 2 + 64 / 16),
    11: TensorType("Q3_K", 256, 110, 4 + 32 / 16),
    12: TensorType("Q4_K", 256, 144, 4 + 64 / 32),
    13: TensorType("Q5_K", 256, 176, 8 + 64 / 32),
    14: TensorType("Q6_K", 256, 210, 8 + 32 / 16),
    20: TensorType("IQ4_NL", 32, 18, 8 + 16 / 32),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54, 2 + 16 / 256),
    35: TensorType("TQ2_0", 256, 66, 2 + 32 / 256),
    39: TensorType("MXFP4", 32, 17, 8 + 32 / 32),
}
# Types that are known but not read, to refuse them by name; ggml removed those in brackets.
UNREAD: Mapping[int, str] = {
    4: "Q4_2 (removed)",
    5: "Q4_3 (removed)",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4 (removed)",
    32: "Q4_0_4_8 (removed)",
    33: "Q4_0_8_8 (removed)",
    36: "IQ4_NL_4_4 (removed)",
    37: "IQ4_NL_4_8 (removed)",
    38: "IQ4_NL_8_8 (removed)",
    40: "NVFP4",
    41: "Q1_0",
}
