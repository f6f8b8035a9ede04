"""Reads small files of a checkpoint, and checks large ones. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.common import denied
from services.compute.model.spec import ModelError

_N_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FLOATS = tuple(_N_BYTES)  # names of the dtypes of unquantized weights
_POINTER = b"version https://git-lfs.github.com/spec/"
INDEX = "model.safetensors.index.json"
# Keys of bounds in two spellings, and the bounds of a file without them.
_PIXELS = (("min_pixels", "shortest_edge", 56 * 56), ("max_pixels", "longest_edge", 28 * 28 * 1280))
# Files of an image processor, and its section in them.
IMAGE_FILES = (("preprocessor_config.json", ""), ("processor_config.json", "image_processor"))
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 64 * 1024
_LONGEST_NAME = 255  # bytes
_HEADER_LENGTH = 8  # bytes at the start of a safetensors file that hold the length of its header


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A tensor of a safetensors file."""

    dtype: str  # by safetensors' name
    shape: tuple[int, ...]
    start: int = 0  # the place of its first byte in the file
    stop: int = 0


def refuse_pointer(file: Path) -> None:
    """Raise ModelError if the file is a Git LFS pointer to a large file, or cannot be read."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_POINTER))
    except PermissionError as error:
        raise ModelError(f"{file}: {denied.reason(file)}") from error
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    if begin == _POINTER:
        raise ModelError(f"{file}: a git-lfs pointer, not the file itself; `git lfs pull` brings it")


def decode_json(content: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(file: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """Return the object (or list) in `file`; an empty one if there is no file. Raises ModelError."""
    if not file.is_file():
        return kind()
    refuse_pointer(file)
    try:
        value = decode_json(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ModelError(f"{file}: not a JSON {'object' if kind is dict else 'list'}")
    return value


def image_settings(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the file of a folder's image processor, as transformers 4 or 5 stores it, and its values; None without."""
    for name, section in IMAGE_FILES:
        file = folder / name
        values: dict[str, Any] = read_json(file)
        values = values.get(section) or {} if section else values
        if values:
            return file, values
    return None


def pixel_bounds(file: Path, values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest and the most pixels of a resized image, from an image processor's values. Raises ModelError."""
    size = values.get("size") or {}
    if not isinstance(size, dict):
        raise ModelError(f"{file}: size: expected an object, found {size!r}")
    bounds = []
    for old, new, default in _PIXELS:
        value = values.get(old, size.get(old, size.get(new, default)))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{file}: {old}: expected a number of pixels, found {value!r}")
        bounds.append(value)
    if bounds[0] > bounds[1]:
        raise ModelError(f"{file}: min_pixels: expected max_pixels, {bounds[1]}, at most, found {bounds[0]}")
    return bounds[0], bounds[1]


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of none, one or several tokens. Raises ValueError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in ids):
        raise ValueError(f"expected a token's id or a list of them, found {value!r}")
    return tuple(ids)


def read_header(file: Path) -> dict[str, StoredEntry]:
    """Return the entries of a safetensors file's tensors, by name.

    Raises ModelError if the file is a Git LFS pointer, is no safetensors file, or is truncated.
    """
    refuse_pointer(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
        if not 2 <= length <= size - _HEADER_LENGTH:
            raise ModelError(f"{file}: not a safetensors file, or cut off: {size} bytes, a header of {length}")
        try:
            header = decode_json(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(entry, _HEADER_LENGTH + length) for name, entry in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{file}: its safetensors header is broken: {error}") from error
    end = _HEADER_LENGTH + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ModelError(
                f"{file}: {name}: begins at byte {entry.start} instead of {end}, where the one before ends"
            )
        end = entry.stop
    if size != end:
        raise ModelError(f"{file}: {'cut off' if size < end else 'too long'}: {size} bytes of {end}")
    return entries


def _entry(stored: Any, data: int) -> StoredEntry:
    """Return an entry of a header; `data`: the place of the first tensor. Raises an error of many kinds."""
    dtype, shape, (start, stop) = stored["dtype"], stored["shape"], stored["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError(f"expected a dtype and a shape, found {dtype!r} and {shape!r}")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"expected a shape and places from 0 on, found {shape!r} and {start!r} to {stop!r}")
    if dtype in _N_BYTES and stop - start != math.prod(shape) * _N_BYTES[dtype]:
        raise ValueError(f"{stop - start} bytes of {dtype} are not of the shape {shape}")
    return StoredEntry(dtype, tuple(shape), data + start, data + stop)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files of a checkpoint; other files of its folder are not read."""

    files: tuple[Path, ...]
    index: Mapping[str, str] = field(default_factory=dict)  # the file of every tensor, if there is an index


FileStates = tuple[tuple[str, int, int, int], ...]  # each file: path, inode, bytes, time of the last change in ns


def file_states(files: Iterable[Path]) -> FileStates:
    """Return the states of files. Raises ModelError."""
    try:
        stats = [(str(file), file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    return tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def weight_files(folder: Path) -> WeightFiles:
    """Return the files of a checkpoint: one, or the shards that its index lists. Raises ModelError.

    An index that does not list the one file is of another checkpoint, as transformers takes it.
    """
    index, single = folder / INDEX, folder / _SINGLE
    places = _places(index) if index.is_file() else {}
    if single.is_file() and _SINGLE not in places.values():
        return WeightFiles((single,))
    if index.is_file():
        read = {name for tensor, name in places.items() if "mtp" not in tensor.split(".")}
        # Layers of multi-token prediction are not read; quantized checkpoints list them in a file that they lack.
        names = sorted(name for name in set(places.values()) if name in read or (folder / name).is_file())
        return WeightFiles(tuple(folder / name for name in names), places)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder / pickles[0]}: pickle files are refused, because reading one runs the code in it; "
            "convert the checkpoint to safetensors"
        )
    raise ModelError(f"{folder}: neither {_SINGLE} nor {INDEX} is there")


def _places(index: Path) -> dict[str, str]:
    """Return the file of every tensor that an index lists. Raises ModelError."""
    places: object = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{index}: weight_map: expected a file's name for each tensor")
    for name in places.values():
        if Path(name).name != name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
            raise ModelError(f"{index}: weight_map: {name!r} is not a file of this folder")
    return places


def end_tokens(file: Path, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text by `generation`, the contents of `file`. Raises ModelError."""
    try:
        return token_ids(generation.get("eos_token_id"))
    except ValueError as error:
        raise ModelError(f"{file}: eos_token_id: {error}") from error


def identity(config: bytes, weights: Sequence[Path]) -> str:
    """A digest of the configuration and of samples of the weights; reading all weights would take too long."""
    digest = sha256(config)
    for file in weights:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in (0, size // 3, size * 2 // 3, max(0, size - _SAMPLE_BYTES)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
