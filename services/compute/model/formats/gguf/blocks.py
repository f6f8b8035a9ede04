"""Takes blocks of GGUF's quantized types apart: codes, scales and offsets, without loss.

(code - zero) * scale + offset in float32 has the bits of `gguf.quants.dequantize`. Codes are as short as stored;
those of a codebook become signed ones of 8 bits, the entries of the book.

Source of the layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of n blocks."""

    codes: Callable[[], Tensor]  # unpacks them: [n, block] uint8, or int8 if the type has no `n_codes`
    scale: Tensor  # [n, groups] float16 or float32
    offset: Tensor | None = None  # [n, groups] float16 or float32
    zero: int = 0  # zero point of all codes


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks; `group` neighbours share a scale."""

    group: int
    n_codes: int  # codes are uint8 below it; 0: int8
    split: Callable[[Tensor], Parts]  # splits [n, n_bytes] uint8


_NIBBLES, _PAIRS, _BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, so that all are integers
_TRITS = (1, 3, 9, 27, 81)


def _unpacked(packed: Tensor, width: int, shifts: tuple[int, ...]) -> Tensor:
    """Return the numbers in bytes [n, m] as [n, m * len(shifts)]: of every `width` bytes, the lowest bits first."""
    # Eight bytes are shifted at once: bits that come from a neighbour are masked, as the others' are.
    lane, lanes = (torch.int64, 0x01010101_01010101) if width % 8 == 0 else (torch.uint8, 1)
    groups = packed.reshape(len(packed), -1, width).clone(memory_format=torch.contiguous_format).view(lane)
    numbers = torch.empty(*groups.shape[:2], len(shifts), groups.shape[2], dtype=lane)
    for place, shift in enumerate(shifts):
        torch.bitwise_right_shift(groups, shift, out=numbers[:, :, place])
    return numbers.bitwise_and_(((1 << (8 // len(shifts))) - 1) * lanes).view(torch.uint8).flatten(1)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte `at` of each block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _of_book(entries: tuple[int, ...], places: Tensor) -> Tensor:
    return torch.tensor(entries, dtype=torch.int8)[places.int()]


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(lambda: _unpacked(blocks[:, 2:], 16, _NIBBLES), _halves(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(lambda: _unpacked(blocks[:, 4:], 16, _NIBBLES), _halves(blocks, 0), _halves(blocks, 2))


def _five_bits(packed: Tensor) -> Tensor:
    return _unpacked(packed[:, 4:], 16, _NIBBLES) | _unpacked(packed[:, :4], 1, _BITS) << 4


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(lambda: _five_bits(blocks[:, 2:]), _halves(blocks, 0), zero=16)


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(lambda: _five_bits(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(lambda: blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    scale = _halves(blocks, 80).float() * (scales & 15)
    return Parts(lambda: _unpacked(blocks[:, 16:80], 32, _PAIRS), scale, -(_halves(blocks, 82).float() * (scales >> 4)))


def _q3_k(blocks: Tensor) -> Parts:
    def codes() -> Tensor:
        return _unpacked(blocks[:, 32:96], 32, _PAIRS) | _unpacked(blocks[:, :32], 32, _BITS) << 2

    sixths = _unpacked(blocks[:, 96:104], 8, _NIBBLES) | _unpacked(blocks[:, 104:108], 4, _PAIRS) << 4
    return Parts(codes, _halves(blocks, 108).float() * (sixths.view(torch.int8) - 32), zero=4)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of 6 bits of Q4_K and Q5_K: the scale and the minimum of each of 8 groups."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return scales, minima


def _k_parts(blocks: Tensor, codes: Callable[[], Tensor]) -> Parts:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return Parts(codes, _halves(blocks, 0).float() * scales, -(_halves(blocks, 2).float() * minima))


def _q4_k(blocks: Tensor) -> Parts:
    return _k_parts(blocks, lambda: _unpacked(blocks[:, 16:], 32, _NIBBLES))


def _q5_k(blocks: Tensor) -> Parts:
    def codes() -> Tensor:
        return _unpacked(blocks[:, 48:], 32, _NIBBLES) | _unpacked(blocks[:, 16:48], 32, _BITS) << 4

    return _k_parts(blocks, codes)


def _q6_k(blocks: Tensor) -> Parts:
    def codes() -> Tensor:
        return _unpacked(blocks[:, :128], 64, _NIBBLES) | _unpacked(blocks[:, 128:192], 32, _PAIRS) << 4

    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Parts(codes, _halves(blocks, 208).float() * scales, zero=32)


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(lambda: _of_book(_IQ4_NL, _unpacked(blocks[:, 2:], 16, _NIBBLES)), _halves(blocks, 0))


def _mxfp4(blocks: Tensor) -> Parts:
    exponent = blocks[:, :1].int()  # E8M0 exponent; half of its power of two, because the codes are doubled
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return Parts(lambda: _of_book(_E2M1, _unpacked(blocks[:, 1:], 16, _NIBBLES)), bits.view(torch.float32))


def _trits(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the numbers 0 to 2 in bytes [n, m], each a fraction of 256 in base 3 with `count` digits."""
    powers = torch.tensor(_TRITS[:count], dtype=torch.uint8).view(1, 1, -1, 1)
    shifted = packed.reshape(len(packed), -1, 1, width) * powers  # modulo 256: the digits before are gone
    return ((shifted.short() * 3) >> 8).to(torch.uint8).flatten(1)


def _tq1_0(blocks: Tensor) -> Parts:
    def codes() -> Tensor:
        parts = _trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4)
        return torch.cat(parts, dim=1)

    return Parts(codes, _halves(blocks, 52), zero=1)


def _tq2_0(blocks: Tensor) -> Parts:
    return Parts(lambda: _unpacked(blocks[:, :64], 32, _PAIRS), _halves(blocks, 64), zero=1)


QUANTIZED: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 16, _q4_0),
    "Q4_1": BlockType(32, 16, _q4_1),
    "Q5_0": BlockType(32, 32, _q5_0),
    "Q5_1": BlockType(32, 32, _q5_1),
    "Q8_0": BlockType(32, 0, _q8_0),
    "Q2_K": BlockType(16, 4, _q2_k),
    "Q3_K": BlockType(16, 8, _q3_k),
    "Q4_K": BlockType(32, 16, _q4_k),
    "Q5_K": BlockType(32, 32, _q5_k),
    "Q6_K": BlockType(16, 64, _q6_k),
    "IQ4_NL": BlockType(32, 0, _iq4_nl),
    "MXFP4": BlockType(32, 0, _mxfp4),
    "TQ1_0": BlockType(256, 3, _tq1_0),
    "TQ2_0": BlockType(256, 4, _tq2_0),
}
