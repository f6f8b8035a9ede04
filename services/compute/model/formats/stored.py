"""Interfaces of a checkpoint's files: tensors by their stored names, and matrices that are stored quantized."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from services.compute.backends.weights import Weight
from services.compute.model.files import FLOATS
from services.compute.model.shard import Shard


class StoredTensors(Protocol):
    """The tensors of one checkpoint; valid while its files are open."""

    @property
    def folder(self) -> Path:
        """The checkpoint's folder or file, for messages."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    @property
    def unlisted(self) -> Collection[str]:
        """The names of tensors that are stored without being part of the checkpoint, by its own list."""

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""

    def whole(self, name: str) -> Any:
        """Return a whole tensor; for small tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape."""

    def dtype(self, name: str) -> str:
        """Return the stored dtype by the format's name."""

    def slice(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Any:
        """Return an object to index for a part of a tensor. Raises ModelError for another shape or dtype."""


class StoredModules(Protocol):
    """The quantized matrices of one checkpoint, by the names of their modules."""

    def holds(self, module: str) -> bool:
        """Whether `module` is stored quantized."""

    def holds_codes(self, module: str) -> bool:
        """Whether the codes of `module` are stored as this reader reads them."""

    def names(self, module: str) -> Iterator[tuple[str, bool]]:
        """Yield the names of a module's tensors, and whether each is required."""

    def codes(self, module: str, shape: tuple[int, int]) -> tuple[str, bool, tuple[int, ...]]:
        """Return the name of a module's codes, whether they are stored [in, out], and their expected shape.

        Of stacked matrices the shape of one.
        """

    def weight(self, shard: Shard) -> Weight:
        """Return a part of a module's weight in its stored form; stacked matrices are one. Raises ModelError."""
