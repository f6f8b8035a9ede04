"""The tensors of a checkpoint folder by their stored names: memory-mapped, checked before they are read."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from services.worker.model.loading.files import read_json, refuse_pointer
from services.worker.model.spec import ModelError

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them: what weights are that nothing has to explain
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFiles:
    """The open safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError."""
        self.folder = folder
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}
        try:
            for file in _files(folder):
                handle = self._files.enter_context(_open(file))
                self._where |= dict.fromkeys(handle.keys(), (file, handle))
        except BaseException:
            self._files.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._where.keys()

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._where[name][0]

    def whole(self, name: str) -> Any:
        """Return a whole tensor, for small ones."""
        return self._where[name][1].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape."""
        return tuple(self._where[name][1].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return how elements are stored, as safetensors calls it."""
        return str(self._where[name][1].get_slice(name).get_dtype())

    def slice(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Any:
        """Return what is indexed to read a part of a tensor that has this shape and dtype. Raises ModelError."""
        file, handle = self._where[name]
        stored = handle.get_slice(name)
        found = tuple(stored.get_shape())
        if found != shape:
            raise ModelError(f"{file}: {name}: expected shape {list(shape)}, found {list(found)}")
        if stored.get_dtype() not in dtypes:
            raise ModelError(f"{file}: {name}: expected {' or '.join(dtypes)}, found {stored.get_dtype()}")
        return stored


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
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ModelError(f"{index}: weight_map: expected a file's name for each tensor")
        names = sorted(set(places.values()))
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
