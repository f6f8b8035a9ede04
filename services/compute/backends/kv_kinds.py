"""Kinds of KV formats: sizes that the server reads, and the formats of the ranks, which alone import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.compute.backends.shapes import KvSize

if TYPE_CHECKING:
    from services.compute.backends.kv_format import PlainNumbers, ScaledCodes


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of one dtype, torch's of that name."""

    dtype: str
    bits: int

    @property
    def size(self) -> KvSize:
        """The bytes of a token's numbers."""
        return KvSize(self.bits)

    def open(self) -> PlainNumbers:
        """Return the format. It imports torch."""
        import torch

        from services.compute.backends.kv_format import PlainNumbers

        return PlainNumbers(self.dtype, getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of one dtype, torch's of that name, with a scale for each token and head."""

    name: str
    codes: str
    bits: int
    largest: float  # code

    @property
    def size(self) -> KvSize:
        """The bytes of a token's codes, and of its scales in bfloat16."""
        return KvSize(self.bits, head=2)

    def open(self) -> ScaledCodes:
        """Return the format. It imports torch."""
        import torch

        from services.compute.backends.kv_format import Coding, ScaledCodes

        return ScaledCodes(self.name, Coding(getattr(torch, self.codes), self.largest))
