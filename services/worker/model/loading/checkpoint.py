"""Reads slices of a safetensors checkpoint, memory-mapped: a rank touches only the bytes of its share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.model.families.naming import TensorRef
from services.worker.model.loading.files import refuse_pointer
from services.worker.model.spec import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Checkpoint:
    """The tensors of one checkpoint folder under their logical keys. A context manager: it holds the files open."""

    def __init__(
        self,
        folder: Path,
        refs: Mapping[str, TensorRef],
        ignored: tuple[str, ...] = (),
        optional_prefix: str = "",
        where_stored: Mapping[str, TensorRef] | None = None,
    ) -> None:
        """`ignored`: patterns of names that may be stored, but are not read. Raises ModelError.

        `optional_prefix`: of names; some checkpoints leave it out. `where_stored`: references that go before those of
        `refs` where there is such a tensor.
        """
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}
        try:
            for file in _files(folder):
                handle = self._files.enter_context(_open(file))
                self._where |= dict.fromkeys(handle.keys(), (file, handle))
            bare = not any(name.startswith(optional_prefix) for name in self._where)
            self._refs = {key: _strip(ref, optional_prefix) for key, ref in refs.items()} if bare else dict(refs)
            self._refs |= {key: ref for key, ref in (where_stored or {}).items() if ref.name in self._where}
            self._check_names(folder, ignored)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def __contains__(self, key: str) -> bool:
        return key in self._refs

    def vector(self, key: str, size: int, span: Span | None = None) -> torch.Tensor:
        """Return elements `span` of the vector `key` of `size` elements. Raises ModelError."""
        ref = self._refs[key]
        rows, take = _stored_rows(ref, span or Span(0, size))
        stored = self._slice(ref.name, (_stored_size(ref, size),))
        return _take_part(stored[rows.start : rows.stop], ref, take)

    def matrix(
        self, key: str, shape: tuple[int, int], rows: Span | None = None, cols: Span | None = None
    ) -> torch.Tensor:
        """Return [rows, cols] of the matrix `key` of `shape` [out, in], all of it by default. Raises ModelError."""
        ref = self._refs[key]
        cols = cols or Span(0, shape[1])
        stored_rows, take = _stored_rows(ref, rows or Span(0, shape[0]))
        depth = _stored_size(ref, shape[0])
        if ref.transposed:
            stored = self._slice(ref.name, (shape[1], depth))
            found = stored[cols.start : cols.stop, stored_rows.start : stored_rows.stop].t()
        else:
            stored = self._slice(ref.name, (depth, shape[1]))
            found = stored[stored_rows.start : stored_rows.stop, cols.start : cols.stop]
        return _take_part(found, ref, take)

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        file, handle = self._where[name]
        stored = handle.get_slice(name)
        found = tuple(stored.get_shape())
        if found != shape:
            raise ModelError(f"{file}: {name}: expected shape {list(shape)}, found {list(found)}")
        return stored

    def _check_names(self, folder: Path, ignored: tuple[str, ...]) -> None:
        expected = {ref.name for ref in self._refs.values()}
        missing = sorted(expected - self._where.keys())
        if missing:
            raise ModelError(f"{folder}: {missing[0]}: missing ({len(missing)} tensors in all)")
        unused = sorted(
            name for name in self._where.keys() - expected if not any(fnmatchcase(name, pattern) for pattern in ignored)
        )
        if unused:
            file = self._where[unused[0]][0]
            raise ModelError(f"{file}: {unused[0]}: not used by this architecture ({len(unused)} tensors in all)")


def _open(file: Path) -> Any:
    refuse_pointer(file)
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or the shards that its index lists."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: weight_map: {error}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index}: weight_map: {outside[0]!r} is not a file of this folder")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder / pickles[0]}: pickle files are refused, because reading one runs the code in it; "
            "convert the checkpoint to safetensors"
        )
    raise ModelError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")


def _strip(ref: TensorRef, prefix: str) -> TensorRef:
    return replace(ref, name=ref.name.removeprefix(prefix))


def _stored_size(ref: TensorRef, size: int) -> int:
    """Return the stored output size of a tensor whose logical part has `size` rows."""
    return size * ref.n_parts if ref.n_stored is None else ref.n_stored


def _stored_rows(ref: TensorRef, rows: Span) -> tuple[Span, int]:
    """Return the stored rows to read for logical `rows`, and the unit of interleaved parts (0: rows as they are)."""
    if not ref.unit:
        return Span(ref.start + rows.start, ref.start + rows.stop), 0
    assert rows.start % ref.unit == len(rows) % ref.unit == 0, "interleaved parts are read in whole units"
    return Span(rows.start * ref.n_parts, rows.stop * ref.n_parts), ref.unit


def _take_part(stored: torch.Tensor, ref: TensorRef, unit: int) -> torch.Tensor:
    if not unit:
        return stored
    rest = stored.shape[1:]
    return stored.reshape(-1, ref.n_parts, unit, *rest)[:, ref.part].reshape(-1, *rest)
