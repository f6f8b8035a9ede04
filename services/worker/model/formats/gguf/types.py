"""The tensor types of GGUF: their numbers in files and the sizes of their blocks. Free of torch.

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


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
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
