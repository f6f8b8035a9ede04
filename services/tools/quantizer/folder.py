"""The folder in which a quantized checkpoint grows: one file for each layer, complete ones listed by the index.

DIR.partial/quantize.json                 the run, its errors and its choice
DIR.partial/model-00001-of-00031.safetensors   a finished layer; the last file holds what is in no layer
DIR.partial/model.safetensors.index.json  lists the tensors of finished files
DIR                                       appears by one rename, so it is always complete
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from services.common.durable import sync
from services.compute.model.files import INDEX, read_json
from services.compute.model.spec import ModelError
from services.tools.tensor_file import write_tensors

RECORD = "quantize.json"


class PartialFolder:
    """A checkpoint that is being written, or was when its process ended."""

    def __init__(self, out: Path, n_files: int) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self._n_files = n_files

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other processes out. Raises ModelError."""
        if self.out.exists():
            raise ModelError(f"--out {self.out}: exists already")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"--out {self.out}: {error.strerror}") from error
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise ModelError(f"{self.path}: another process writes it") from error
        finally:
            os.close(handle)

    def begin(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return the record of an ended process, or an empty one. Raises ModelError if it is that of another run."""
        record: dict[str, Any] = read_json(self.path / RECORD)
        if record and record["run"] != run:
            before = record["run"]
            differ = [key for key in run if before.get(key) != run[key]]
            changed = ", ".join(f"{key} {before.get(key)!r}, not {run[key]!r}" for key in differ)
            raise ModelError(f"{self.path}: holds another run ({changed}); remove it or choose another --out")
        if not record:
            record = {"run": run, "survey": [], "layers": []}
            self.record(record)
        return record

    def record(self, record: dict[str, Any]) -> None:
        """Replace the record."""
        self.write_json(RECORD, record)

    def file(self, number: int) -> str:
        """Return the name of file `number`, from 0 on."""
        return f"model-{number + 1:05d}-of-{self._n_files:05d}.safetensors"

    def has(self, number: int) -> bool:
        """Whether file `number` is complete."""
        return self.file(number) in read_json(self.path / INDEX).get("weight_map", {}).values()

    def add(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Write file `number`, then list it."""
        name = self.file(number)
        temporary = self.path / f"{name}.new"
        write_tensors(tensors, temporary)
        sync(temporary)
        temporary.replace(self.path / name)
        index = read_json(self.path / INDEX) or {"metadata": {"total_size": 0}, "weight_map": {}}
        if name not in index["weight_map"].values():
            index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        index["weight_map"] |= dict.fromkeys(tensors, name)
        self.write_json(INDEX, index)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Replace a JSON file at once."""
        temporary = self.path / f"{name}.new"
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
        sync(temporary)
        temporary.replace(self.path / name)

    def publish(self) -> None:
        """Give the folder its name."""
        self.path.rename(self.out)
        sync(self.out.parent)
