"""Layers whose weights stay integers on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from services.compute.backends.cpu.codes import Part, holds_integers, pack, plan
from services.compute.backends.cpu.linear import KernelLinear, KernelProduct, check_rows
from services.compute.backends.weights import Dense, Stacked, Weight
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from services.compute.kernels.codes import PackedCodes


@dataclass(frozen=True, slots=True)
class _Piece:
    """A product of some outputs, from `start` on."""

    start: int
    n_out: int
    product: PackedCodes | KernelLinear
    bias: Tensor | None  # float32, of a product of codes


def stays_integer(weight: Stacked) -> bool:
    """Whether our kernels multiply with a part of `weight` as it is stored."""
    return any(holds_integers(part) for part in weight.parts)


class QuantizedLinear(KernelProduct):
    """A weight of integers, perhaps with other parts, multiplied piece by piece."""

    def __init__(self, kernels: Bfloat16Kernels, weight: Stacked, bias: Tensor | None) -> None:
        super().__init__(kernels, weight)
        self._pieces, start = list[_Piece](), 0
        for parts, n_zeros in _runs(weight):
            n_out = sum(part.weight.shape[0] if isinstance(part, Part) else part.shape[0] for part in parts) + n_zeros
            added = None if bias is None else bias[start : start + n_out]
            self._pieces.append(self._piece(parts, n_zeros, start, n_out, added))
            start += n_out

    @property
    def looks_up(self) -> bool:
        """Whether `rows` works: all rows are codes in one piece."""
        return len(self._pieces) == 1 and isinstance(self._pieces[0].product, PackedCodes)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the numbers of the rows `ids` [n], each rounded once: [n, n_in]."""
        check_rows(ids, self._n_out)
        product = self._pieces[0].product
        assert isinstance(product, PackedCodes)
        return self._kernels.look_up(product, ids)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out` [n, n_out], bfloat16 or float32."""
        made: tuple[PackedCodes, Tensor] | None = None  # inputs that the next piece may share
        for piece in self._pieces:
            to = out[:, piece.start : piece.start + piece.n_out]
            if isinstance(piece.product, KernelLinear):
                piece.product.write(x, to)
                continue
            if made is None or not piece.product.takes_inputs_of(made[0]):
                made = piece.product, self._kernels.inputs(x, piece.product)
            self._kernels.quantized_linear(made[1], piece.product, piece.bias, to)

    def _piece(
        self, parts: list[Part] | list[Weight], n_zeros: int, start: int, n_out: int, bias: Tensor | None
    ) -> _Piece:
        integers = [part for part in parts if isinstance(part, Part)]
        if integers:
            added = None if bias is None else bias.float()
            return _Piece(start, n_out, pack(self._kernels, integers, n_zeros), added)
        dense = Stacked(tuple(part for part in parts if not isinstance(part, Part)))
        return _Piece(start, n_out, KernelLinear(self._kernels, dense, bias), None)


def _runs(weight: Stacked) -> Iterator[tuple[list[Part] | list[Weight], int]]:
    """Yield parts that one product multiplies, in order, and the number of rows of zeros that follow them."""
    run, n_zeros = list[Part](), 0
    for part in weight.parts:
        planned = plan(part)
        if planned is None and run and isinstance(part, Dense) and not part.values.any():
            n_zeros += part.shape[0]
            continue
        if run and (planned is None or n_zeros or not run[0].joins(planned)):
            yield run, n_zeros
            run, n_zeros = [], 0
        if planned is None:
            yield [part], 0
        else:
            run.append(planned)
    if run:
        yield run, n_zeros
