"""The names and files of a model's tensors in the written checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from services.compute.model.families.naming import Family, TensorRef, stored_size
from services.compute.model.loading.checkpoint import Checkpoint, stored_rows
from services.compute.model.shard import Span
from services.compute.model.spec import ModelError, ModelSpec


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a stored tensor that hold a logical matrix or vector."""

    name: str  # the tensor's name
    n_stored: int  # its rows
    rows: Tensor  # [size] int64


@dataclass(frozen=True, slots=True)
class QuantizationTarget:
    """The names and places of the written tensors."""

    model: Path  # the quantized model, for messages
    refs: Mapping[str, TensorRef]  # by logical key

    @classmethod
    def of(cls, model: Path, source: Checkpoint, family: Family, spec: ModelSpec) -> QuantizationTarget:
        """Return the places of `source`, but experts that it stacks get tensors of their own if the family names them.

        Programs that read compressed-tensors read experts one by one.
        """
        usual = family.refs(spec)
        prefix = "" if source.ref("embed") == usual["embed"] else family.optional_prefix

        def ref(key: str) -> TensorRef:
            if not key.startswith("layers."):
                return source.ref(key)
            return replace(usual[key], name=usual[key].name.removeprefix(prefix))

        return cls(model, {key: ref(key) for key in source})

    def place(self, key: str, size: int) -> StoredRows:
        """Return where the `size` rows of a matrix, or elements of a vector, lie. Raises ModelError if transposed."""
        ref = self.refs[key]
        if ref.transposed or ref.place is not None:
            raise ModelError(f"{self.model}: {ref.name}: stored transposed or stacked, which is not quantized")
        rows, interleaved = stored_rows(ref, Span(0, size))
        places = torch.arange(rows.start, rows.stop)
        return StoredRows(ref.name, stored_size(ref, size), places if interleaved is None else places[interleaved])

    def module(self, key: str) -> str:
        """Return the name of the module that holds a matrix."""
        return self.refs[key].name.removesuffix(".weight")
