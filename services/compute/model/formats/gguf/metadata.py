"""The metadata of a GGUF file, by key, with checked types. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.compute.model.spec import ModelError

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]


class GgufMetadata(Mapping[str, Value]):
    """The values of one file; the typed getters raise ModelError naming the file and the key."""

    def __init__(self, file: Path, values: Mapping[str, Value]) -> None:
        self.file = file
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def without_lists(self, prefix: str) -> GgufMetadata:
        """Return the metadata without the lists whose keys begin with `prefix`."""
        lists = {key for key, value in self.items() if isinstance(value, tuple) and key.startswith(prefix)}
        return GgufMetadata(self.file, {key: value for key, value in self.items() if key not in lists})

    def error(self, key: str, problem: str) -> ModelError:
        """Return an error that names this file and `key`."""
        return ModelError(f"{self.file}: {key}: {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; `default` if the key is absent. Raises ModelError, also if both are absent."""
        value = self._found(key, default, "a text")
        if not isinstance(value, str):
            raise self.error(key, f"expected a text, found {_said(value)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; `default` if the key is absent. Raises ModelError, also if both are absent."""
        value = self._found(key, default, "an integer")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"expected an integer, found {_said(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; `default` if the key is absent. Raises ModelError, also if both are absent."""
        value = self._found(key, default, "a number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"expected a number, found {_said(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; `default` if the key is absent. Raises ModelError, also if both are absent."""
        value = self._found(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {_said(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; an empty one if the key is absent. Raises ModelError."""
        value = self._list(key)
        if value and not isinstance(value[0], str):  # the elements of an array have one type
            raise self.error(key, f"expected texts, found {_said(value[0])}")
        return value  # type: ignore[return-value]

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; an empty one if the key is absent. Raises ModelError."""
        value = self._list(key)
        if value and (not isinstance(value[0], int) or isinstance(value[0], bool)):
            raise self.error(key, f"expected integers, found {_said(value[0])}")
        return value  # type: ignore[return-value]

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; an empty one if the key is absent. Raises ModelError."""
        value = self._list(key)
        if value and (not isinstance(value[0], int | float) or isinstance(value[0], bool)):
            raise self.error(key, f"expected numbers, found {_said(value[0])}")
        return value  # type: ignore[return-value]

    def _found(self, key: str, default: Value | None, expected: str) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, f"missing: expected {expected}")
        return value

    def _list(self, key: str) -> tuple[Scalar, ...]:
        value = self._values.get(key, ())
        if not isinstance(value, tuple):
            raise self.error(key, f"expected a list, found {_said(value)}")
        return value


def _said(value: Value) -> str:
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
