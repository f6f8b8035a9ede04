"""The tensors of a checkpoint folder by their names: memory-mapped, checked before they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from services.compute.model.families.naming import renamed
from services.compute.model.files import FLOATS, INDEX, WeightFiles, refuse_pointer, weight_files
from services.compute.model.spec import ModelError


class TensorFiles:
    """The open safetensors files of one folder."""

    def __init__(self, folder: Path, prefixes: Sequence[tuple[str, str]] = (), ignored: Sequence[str] = ()) -> None:
        """`prefixes` of stored names and what replaces them; the first that fits counts. Raises ModelError.

        `ignored`: patterns of names that nothing reads; the index may list such tensors that no file holds.
        """
        self.folder, self._prefixes, self._ignored = folder, prefixes, ignored
        self._unlisted: set[str] = set()
        self._files = ExitStack()
        self._where: dict[str, tuple[Path, Any, str]] = {}  # with the stored name
        try:
            self._place(weight_files(folder))
        except BaseException:
            self._files.close()
            raise

    def _place(self, stored: WeightFiles) -> None:
        """Find the file of every tensor; the index decides if several files hold it. Raises ModelError."""
        holders: dict[str, dict[str, tuple[Path, Any]]] = defaultdict(dict)  # by tensor, then by file
        for file in stored.files:
            handle = self._files.enter_context(_open(file))
            for name in handle.keys():  # noqa: SIM118 - it cannot be iterated
                holders[name][file.name] = file, handle
        index = self.folder / INDEX
        absent = sorted(name for name in stored.index.keys() - holders.keys() if not self._is_ignored(name))
        if absent:
            raise ModelError(f"{index}: weight_map: no file holds {absent[0]} ({len(absent)} tensors in all)")
        for name, files in holders.items():
            if len(files) > 1 and stored.index.get(name) not in files:
                raise ModelError(f"{index}: weight_map: {name} is in {' and '.join(files)}; it has to say in which")
            file, handle = files.get(stored.index.get(name, "")) or next(iter(files.values()))
            self._where[renamed(name, self._prefixes)] = file, handle, name
            if stored.index and name not in stored.index:
                self._unlisted.add(renamed(name, self._prefixes))

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(renamed(name, self._prefixes), pattern) for pattern in self._ignored)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._where.keys()

    @property
    def unlisted(self) -> Collection[str]:
        """The names of tensors that the index of the folder does not list."""
        return self._unlisted

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._where[name][0]

    def whole(self, name: str) -> Any:
        """Return a whole tensor; for small tensors."""
        _, handle, stored = self._where[name]
        return handle.get_tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape."""
        _, handle, stored = self._where[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Return the stored dtype by safetensors' name."""
        _, handle, stored = self._where[name]
        return str(handle.get_slice(stored).get_dtype())

    def slice(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Any:
        """Return an object to index for a part of a tensor. Raises ModelError for another shape or dtype."""
        file, handle, name = self._where[name]
        stored = handle.get_slice(name)
        stored_shape = tuple(stored.get_shape())
        if stored_shape != shape:
            raise ModelError(f"{file}: {name}: expected shape {list(shape)}, found {list(stored_shape)}")
        if stored.get_dtype() not in dtypes:
            raise ModelError(f"{file}: {name}: expected {' or '.join(dtypes)}, found {stored.get_dtype()}")
        return stored


def _open(file: Path) -> Any:
    refuse_pointer(file)
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: {error}") from error
