"""Reads slices of a memory-mapped checkpoint; a rank touches only the bytes of its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch

from services.compute.backends.columns import take_columns
from services.compute.backends.weights import Dense, Weight
from services.compute.model.families.naming import TensorRef, stored_size
from services.compute.model.formats.stored import StoredModules, StoredTensors
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelError

WeightT = TypeVar("WeightT", bound=Weight)


@dataclass(frozen=True, slots=True)
class StoredShape:
    """The shape of a stored tensor, and the expected shape."""

    file: Path
    name: str
    actual: tuple[int, ...]
    wanted: tuple[int, ...]
    transposed: bool  # stored [in, out]


class Checkpoint:
    """The tensors of one checkpoint by their logical keys; valid while its files are open."""

    def __init__(
        self,
        files: StoredTensors,
        refs: Mapping[str, TensorRef],
        ignored: tuple[str, ...] = (),
        optional_prefix: str = "",
        where_stored: Mapping[str, TensorRef] | None = None,
        quantized: tuple[StoredModules, ...] = (),
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        """`ignored`: patterns of names that may be stored, but are not read. Raises ModelError.

        `optional_prefix`: a prefix of names that some checkpoints omit. `where_stored`: references that take precedence
        over `refs` if such a tensor is stored. `quantized`: readers of quantized modules. `dtype`: weights that are not
        finite in this dtype are refused; None: an earlier reader has checked them.
        """
        self._files, self._dtype, self._quantized = files, dtype, quantized
        bare = not any(name.startswith(optional_prefix) for name in files.names)
        prefix = optional_prefix if bare else ""
        self._refs = {key: _strip(ref, prefix) for key, ref in refs.items()}
        instead = {key: _strip(ref, prefix) for key, ref in (where_stored or {}).items()}
        self._refs |= {key: ref for key, ref in instead.items() if self._is_stored(ref)}
        self._check_names(ignored)

    def __contains__(self, key: str) -> bool:
        return key in self._refs

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)  # the logical keys

    def name(self, key: str) -> str:
        """Return the name of the tensor or, without its suffix, of the quantized module that holds `key`."""
        return _module(self._refs[key])

    def ref(self, key: str) -> TensorRef:
        """Return where `key` is stored."""
        return self._refs[key]

    def is_one(self, key: str, other: str) -> bool:
        """Whether two keys refer to the same stored numbers."""
        return self._refs[key] == self._refs[other]

    def stored_shape(self, key: str, shape: tuple[int, ...]) -> StoredShape:
        """Return the stored and the expected shape of the tensor of `key`; `shape` is [out] or [out, in]."""
        ref = self._refs[key]
        name, transposed = ref.name, ref.transposed
        wanted: tuple[int, ...] = (stored_size(ref, shape[0]), *shape[1:])
        if len(wanted) == 2 and (quantized := self._reader_of(ref)) is not None:
            name, transposed, wanted = quantized.codes(_module(ref), (wanted[0], wanted[1]))
        elif transposed:
            wanted = wanted[::-1]
        if ref.filtered and len(wanted) == 2:
            wanted = (wanted[0], 1, wanted[1])
        if ref.place is not None:
            wanted = (ref.n_stacked, *wanted)
        if ref.folded or ref.boxed:
            wanted = _folded(ref, wanted[0])
        if ref.flat:
            wanted = wanted[1:]
        stored = self._files.shape(name) or (1,)  # a single number
        return StoredShape(self._files.file(name), name, stored, wanted, transposed)

    def number(self, key: str) -> float:
        """Return a single number. Raises ModelError."""
        ref = self._refs[key]
        stored = self._files.whole(ref.name).reshape(1, -1)
        if stored.numel() != 1:
            raise ModelError(f"{self._files.file(ref.name)}: {ref.name}: expected one number, found {stored.numel()}")
        return float(self._finite(Dense(stored), ref).values)

    def vector(self, key: str, size: int, span: Span | None = None) -> torch.Tensor:
        """Return elements `span` of the vector `key` of `size` elements. Raises ModelError."""
        ref = self._refs[key]
        rows, interleaved = stored_rows(ref, span or Span(0, size))
        stored: tuple[int, ...] = (stored_size(ref, size),)
        if ref.place is not None:
            vector = self._files.slice(ref.name, (ref.n_stacked, *stored))[ref.place, rows.start : rows.stop]
        elif ref.folded or ref.boxed:
            vector = self._files.slice(ref.name, _folded(ref, *stored))[:].flatten()[rows.start : rows.stop]
        else:
            vector = self._files.slice(ref.name, stored)[rows.start : rows.stop]
        vector = vector if interleaved is None else vector[interleaved]
        return self._finite(_logical(Dense(vector.unsqueeze(0)), ref), ref).values[0]

    def weight(self, shard: Shard) -> Weight:
        """Return a part of a matrix in its stored form. Raises ModelError."""
        ref = self._refs[shard.key]
        rows, interleaved = stored_rows(ref, shard.rows)
        cols, tiled = _stored_columns(ref, shard.cols)
        stored = Shard(_module(ref), (stored_size(ref, shard.shape[0]), shard.shape[1]), rows, cols)
        quantized = self._reader_of(ref)
        weight: Weight
        if quantized is None:
            weight = _logical(self._dense(ref, stored), ref)
        else:
            weight = quantized.weight(_within_stack(ref, stored))
        weight = weight if tiled is None else take_columns(weight, tiled)
        return self._finite(weight if interleaved is None else weight.take(interleaved), ref)

    def _dense(self, ref: TensorRef, stored: Shard) -> Dense:
        rows, cols = (slice(span.start, span.stop) for span in (stored.rows, stored.cols))
        if ref.flat:
            return Dense(self._files.slice(ref.name, stored.shape[1:])[cols].unsqueeze(0)[rows])
        if ref.filtered:
            n_out, n_in = stored.shape
            return Dense(self._files.slice(ref.name, (n_out, 1, n_in))[rows, 0, cols])
        if ref.transposed and ref.place is not None:
            stack = self._files.slice(ref.name, (ref.n_stacked, *stored.shape[::-1]))
            return Dense(stack[ref.place, cols, rows].t())
        if ref.transposed:
            return Dense(self._files.slice(ref.name, stored.shape[::-1])[cols, rows].t())
        if ref.place is not None:
            return Dense(self._files.slice(ref.name, (ref.n_stacked, *stored.shape))[ref.place, rows, cols])
        return Dense(self._files.slice(ref.name, stored.shape)[rows, cols])

    def _finite(self, weight: WeightT, ref: TensorRef) -> WeightT:
        """Return `weight`. Raises ModelError if an element is not finite in the served dtype."""
        if self._dtype is None:
            return weight
        low, high = weight.ends()
        largest = torch.finfo(self._dtype).max
        if not -largest <= low <= high <= largest:  # also False for NaN
            name, end = _module(ref), high if abs(low) <= largest else low
            raise ModelError(f"{self._file(ref)}: {name}: holds {end}, which is not finite in {self._dtype}")
        return weight

    def _file(self, ref: TensorRef) -> Path:
        quantized = self._reader_of(ref)
        return self._files.file(ref.name if quantized is None else quantized.codes(_module(ref), (1, 1))[0])

    def _reader_of(self, ref: TensorRef) -> StoredModules | None:
        """Return the reader of `ref` if it is quantized, otherwise None."""
        if not self._quantized or not (ref.name.endswith(".weight") or ref.place is not None):
            return None
        module = _module(ref)
        holding = [reader for reader in self._quantized if reader.holds(module)]
        # Layouts may call their scales the same, never their codes; a module without codes is reported by the first.
        return next((reader for reader in holding if reader.holds_codes(module)), holding[0] if holding else None)

    def _is_stored(self, ref: TensorRef) -> bool:
        return ref.name in self._files.names or self._reader_of(ref) is not None

    def _check_names(self, ignored: tuple[str, ...]) -> None:
        files, expected, optional = self._files, set[str](), set[str]()
        for ref in self._refs.values():
            if (quantized := self._reader_of(ref)) is None:
                expected.add(ref.name)
                continue
            if ref.transposed and ref.place is None:
                raise ModelError(f"{files.folder}: {_module(ref)}: quantized weights of this architecture are not read")
            expected |= {name for name, needed in quantized.names(_module(ref)) if needed}
            optional |= {name for name, needed in quantized.names(_module(ref)) if not needed}
            bias = f"{_module(ref)}.bias"  # some programs store a bias for every quantized module
            if bias in files.names and not files.whole(bias).any():
                optional.add(bias)
        missing = sorted(expected - set(files.names))
        if missing:
            prefix = _prefix(missing[0], files.names)
            hint = f"; it is there with the prefix {prefix!r}, without which it has to be stored" if prefix else ""
            raise ModelError(f"{files.folder}: {missing[0]}: missing ({len(missing)} tensors in all){hint}")
        left = set(files.names) - expected - optional - set(files.unlisted)
        unused = sorted(name for name in left if not any(fnmatchcase(name, pattern) for pattern in ignored))
        if unused:
            file = files.file(unused[0])
            raise ModelError(f"{file}: {unused[0]}: not used by this architecture ({len(unused)} tensors in all)")


def _prefix(name: str, stored: Iterable[str]) -> str:
    """Return the prefix of `name` in one of the `stored` names; "" if no name has one."""
    return next((other.removesuffix(name) for other in stored if other.endswith(f".{name}")), "")


def _folded(ref: TensorRef, size: int) -> tuple[int, ...]:
    """Return the shape of a vector that is stored as [1, 1, n, 1], or as rows, or as a vector if they are one."""
    if ref.boxed:
        return (1, 1, size, 1)
    n_rows = size // ref.folded
    return (n_rows, ref.folded) if n_rows > 1 else (ref.folded,)


def _logical(weight: Dense, ref: TensorRef) -> Dense:
    """Return numbers from how they are stored; NaN where that is impossible."""
    return Dense(torch.log(-weight.values.float())) if ref.exponential else weight


def _module(ref: TensorRef) -> str:
    return ref.name.removesuffix(".weight")


def _strip(ref: TensorRef, prefix: str) -> TensorRef:
    return replace(ref, name=ref.name.removeprefix(prefix))


def _within_stack(ref: TensorRef, stored: Shard) -> Shard:
    """Return the part `stored` of a matrix as a part of the stack that holds it, if one does."""
    if ref.place is None:
        return stored
    n_out, n_in = stored.shape
    first = ref.place * n_out
    rows = Span(first + stored.rows.start, first + stored.rows.stop)
    return Shard(stored.key, (ref.n_stacked * n_out, n_in), rows, stored.cols)


def stored_rows(ref: TensorRef, rows: Span) -> tuple[Span, torch.Tensor | None]:
    """Return the stored rows to read for logical `rows`, and the indices among them if they are in another order."""
    if not ref.unit:
        return Span(ref.start + rows.start, ref.start + rows.stop), None
    assert rows.start % ref.unit == len(rows) % ref.unit == 0, "parts in another order are read in whole units"
    number = torch.arange(rows.start, rows.stop)
    unit, within = number // ref.unit, number % ref.unit
    if half := ref.n_paired // 2:
        turned = within - ref.first_paired
        paired = (turned >= 0) & (turned < ref.n_paired)
        within = torch.where(paired, ref.first_paired + turned % half * 2 + turned // half, within)
    place = unit // ref.n_units * ref.n_parts + ref.part + unit % ref.n_units  # index among the stored units
    return _span_of(ref.start + _tiled(ref, place) * ref.unit + within)


def _stored_columns(ref: TensorRef, cols: Span) -> tuple[Span, torch.Tensor | None]:
    """Return the stored columns to read for logical `cols`, and the indices among them if they are in another order."""
    if not ref.tiled_columns:
        return cols, None
    number = torch.arange(cols.start, cols.stop)
    return _span_of(_tiled(ref, number // ref.tiled_columns) * ref.tiled_columns + number % ref.tiled_columns)


def _tiled(ref: TensorRef, unit: torch.Tensor) -> torch.Tensor:
    """Return the places of units among those of all groups."""
    return unit if ref.group == 1 else unit % ref.group * ref.n_groups + unit // ref.group


def _span_of(stored: torch.Tensor) -> tuple[Span, torch.Tensor]:
    """Return the span that holds the rows or columns with these numbers, and their indices in it."""
    first, last = int(stored.min()), int(stored.max())
    return Span(first, last + 1), stored - first
