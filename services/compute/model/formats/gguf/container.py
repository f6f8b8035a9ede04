"""Reads the container of a GGUF file: metadata, and where each tensor is. Free of torch and numpy.

Every count, length and offset is checked against the size of the file before memory is taken for it. The reader of the
`gguf` package trusts them, and needs 20 s for a vocabulary of 262,144 tokens.

Source: the specification of GGUF (ggml, docs/gguf.md), versions 2 and 3 in little-endian order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.compute.model.files import refuse_pointer
from services.compute.model.formats.gguf.metadata import GgufMetadata, Scalar, Value
from services.compute.model.formats.gguf.types import TYPES, UNREAD, TensorType
from services.compute.model.spec import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # tensors' alignment in bytes, unless general.alignment sets another
_ALIGNMENTS = range(8, (1 << 20) + 1)
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS = 1 << 16, 1 << 18, 1 << 24  # many times those of the largest models
_MAX_TEXT = 1 << 24  # bytes
_MAX_HEADER = 1 << 30  # bytes
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = 8  # bytes of a length
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32  # bytes of the shortest key with its value, and of a tensor's description


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place: `n_bytes` of `file` from `offset`."""

    name: str
    shape: tuple[int, ...]  # in torch's order: the last dimension is contiguous
    type: TensorType
    file: Path
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file, or all files of a divided model."""

    metadata: GgufMetadata
    tensors: Mapping[str, TensorInfo]

    def without_vocabulary(self) -> GgufFile:
        """Return the header without its lists for a tokenizer, which are nearly all of its memory."""
        return GgufFile(self.metadata.without_lists("tokenizer."), self.tensors)


def read_container(file: Path) -> GgufFile:
    """Read the header of one file. Raises ModelError naming the file and what is wrong with it."""
    refuse_pointer(file)
    with file.open("rb") as stream:
        return _Header(file, stream).read()


class _Header:
    """Reads one header from its start to its end; raises ModelError before it reads what the file cannot hold."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._size = file.stat().st_size
        self._left = min(self._size, _MAX_HEADER)

    def read(self) -> GgufFile:
        self._read_magic()
        n_tensors, n_keys = self._unpack("<QQ")
        self._check_count("tensors", n_tensors, _LEAST_TENSOR, _MAX_TENSORS)
        self._check_count("keys", n_keys, _LEAST_ENTRY, _MAX_KEYS)
        values: dict[str, Value] = {}
        for index in range(n_keys):
            key = self._text(f"key {index}")
            if key in values:
                raise self._error(f"{key}: twice in the header")
            values[key] = self._value(key)
        metadata = GgufMetadata(self._file, values)
        alignment = _alignment(metadata)
        described = [self._tensor(index) for index in range(n_tensors)]
        start = -(-self._stream.tell() // alignment) * alignment
        return GgufFile(metadata, self._placed(described, start, alignment))

    def _read_magic(self) -> None:
        magic = self._take(len(MAGIC), "its first bytes")
        if magic != MAGIC:
            raise self._error(f"not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
        (version,) = self._unpack("<I")
        if version & 0xFFFF == 0:
            raise self._error("in big-endian byte order, which is not read; convert it with gguf_convert_endian.py")
        if version not in _VERSIONS:
            allowed = " and ".join(map(str, _VERSIONS))
            raise self._error(f"version {version} of GGUF is not read; allowed: {allowed}")

    def _value(self, key: str) -> Value:
        (kind,) = self._unpack("<I")
        if kind == _TEXT:
            return self._text(key)
        if kind in _SCALARS:
            scalar: Scalar = self._unpack(f"<{_SCALARS[kind]}")[0]
            return scalar
        if kind != _ARRAY:
            raise self._error(f"{key}: type {kind} of a value is unknown")
        kind, n_items = self._unpack("<IQ")
        if kind == _TEXT:
            self._check_count(f"texts of {key}", n_items, _LENGTH, _MAX_ITEMS)
            return tuple(self._texts(key, n_items))
        if kind not in _SCALARS:
            raise self._error(f"{key}: a list of values of type {kind} is not read")
        code = _SCALARS[kind]
        self._check_count(f"values of {key}", n_items, struct.calcsize(f"<{code}"), _MAX_ITEMS)
        return self._unpack(f"<{n_items}{code}")

    def _tensor(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, type and relative offset of the tensor `index`."""
        name = self._text(f"the name of tensor {index}")
        (n_dimensions,) = self._unpack("<I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"{name}: expected 1 to {_MAX_DIMENSIONS} dimensions, found {n_dimensions}")
        shape = self._unpack(f"<{n_dimensions}Q")[::-1]
        if n_dimensions == 2 and shape[0] == 1:  # the format does not tell a matrix of one row from a vector
            shape = shape[1:]
        kind, offset = self._unpack("<IQ")
        return name, shape, kind, offset

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Return the tensors by name, in the order of the file, after checks of their places."""
        tensors: dict[str, TensorInfo] = {}
        end, before = start, "the header"
        for name, shape, kind, offset in sorted(described, key=lambda one: one[3]):
            if name in tensors:
                raise self._error(f"{name}: twice in the header")
            info = TensorInfo(name, shape, self._type(name, kind), self._file, start + offset, 0)
            n_bytes = self._n_bytes(info)
            if offset % alignment:
                raise self._error(f"{name}: its offset {offset} is no multiple of the alignment {alignment}")
            if info.offset + n_bytes > self._size:
                raise self._error(
                    f"{name}: needs bytes {info.offset} to {info.offset + n_bytes}, but the file has {self._size}: "
                    "it is cut off, or the header is wrong"
                )
            if info.offset < end:
                raise self._error(f"{name}: begins at byte {info.offset}, inside of {before}, which ends at {end}")
            tensors[name] = TensorInfo(name, shape, info.type, self._file, info.offset, n_bytes)
            end, before = info.offset + n_bytes, name
        return tensors

    def _type(self, name: str, kind: int) -> TensorType:
        tensor_type = TYPES.get(kind)
        if tensor_type is None:
            known = ", ".join(other.name for other in TYPES.values())
            label = UNREAD.get(kind, f"number {kind}")
            raise self._error(
                f"{name}: tensors of type {label} are not read; take a file of another quantization, such as Q4_K_M or "
                f"Q8_0, or requantize it with llama-quantize (read are {known})"
            )
        return tensor_type

    def _n_bytes(self, info: TensorInfo) -> int:
        row, kind = info.shape[-1], info.type
        if not all(info.shape):
            raise self._error(f"{info.name}: has no elements: its shape is {list(info.shape)}")
        if row % kind.block:
            raise self._error(f"{info.name}: rows of {row} elements are no multiple of {kind.name}'s {kind.block}")
        return math.prod(info.shape) // kind.block * kind.n_bytes

    def _text(self, what: str) -> str:
        return self._texts(what, 1)[0]

    def _texts(self, what: str, count: int) -> list[str]:
        """Return `count` texts; without a call for each, because vocabularies are long."""
        texts, read, left = [], self._stream.read, self._left
        for _ in range(count):
            length = int.from_bytes(read(_LENGTH), "little")
            if length > _MAX_TEXT:
                raise self._error(f"{what}: a text of {length} bytes; allowed: {_MAX_TEXT}")
            left -= _LENGTH + length
            if left < 0:
                raise self._error(f"cut off in {what}: {length} bytes are needed and {max(left + length, 0)} left")
            texts.append(read(length))
        self._left = left
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: not UTF-8: {error}") from error

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), "its header"))

    def _take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self._left:
            raise self._error(f"cut off in {what}: {n_bytes} bytes are needed and {self._left} left")
        self._left -= n_bytes
        data = self._stream.read(n_bytes)
        if len(data) != n_bytes:
            raise self._error(f"cut off in {what} while it was read")
        return data

    def _check_count(self, what: str, count: int, least: int, most: int) -> None:
        """Refuse a number of things of `least` bytes that the rest of the file cannot hold, or that is absurd."""
        if count > most or count * least > self._left:
            raise self._error(f"says {count} {what}, but {min(most, self._left // least)} are possible")

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._file}: {problem}")


def _alignment(metadata: GgufMetadata) -> int:
    alignment = metadata.integer("general.alignment", _ALIGNMENT)
    if alignment not in _ALIGNMENTS or alignment & (alignment - 1):
        problem = f"expected a power of 2 from {_ALIGNMENTS.start} to {_ALIGNMENTS.stop - 1}, found {alignment}"
        raise metadata.error("general.alignment", problem)
    return alignment
