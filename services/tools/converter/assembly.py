"""Puts a model's logical tensors together into stored ones: the reverse of reading a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.weights import Stacked
from services.compute.model.families.naming import TensorRef, stored_size
from services.compute.model.families.sizes import Shape, logical_shape
from services.compute.model.loading.checkpoint import Checkpoint, stored_rows
from services.compute.model.shard import Shard, Span

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to write, and the logical tensors that it holds."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorRef], ...]  # logical keys with their places

    @property
    def key(self) -> str:
        """The first logical key."""
        return self.parts[0][0]


def plan(refs: Mapping[str, TensorRef], shapes: dict[str, Shape]) -> list[StoredTensor]:
    """Return the stored tensors of these references, each once."""
    grouped: dict[str, dict[TensorRef, str]] = defaultdict(dict)
    for key, ref in refs.items():
        grouped[ref.name].setdefault(ref, key)  # a tied head has the embedding's reference
    return [
        StoredTensor(name, _stored_shape(held, shapes), tuple((key, ref) for ref, key in held.items()))
        for name, held in grouped.items()
    ]


def _stored_shape(held: Mapping[TensorRef, str], shapes: dict[str, Shape]) -> tuple[int, ...]:
    ref, key = next(iter(held.items()))
    n_out, *n_in = (size.value for size in logical_shape(key, shapes))
    shape = (stored_size(ref, n_out), *n_in)
    if ref.transposed:
        return shape[::-1]
    return shape if ref.place is None else (ref.n_stacked, *shape)


def assemble(stored: StoredTensor, read: Callable[[str], Tensor]) -> Tensor:
    """Return a stored tensor in float32 from the logical tensors that `read` returns."""
    whole = torch.empty(stored.shape, dtype=torch.float32)
    for key, ref in stored.parts:
        part = read(key)
        within = whole.t() if ref.transposed else whole if ref.place is None else whole[ref.place]
        rows, order = stored_rows(ref, Span(0, len(part)))
        place = within[rows.start : rows.stop]
        if order is None:
            place.copy_(part)
        else:
            place[order] = part
    return whole


class LogicalReader:
    """Reads whole logical tensors in float32; norms as their whole factor, without the family's offset."""

    def __init__(self, source: Checkpoint, shapes: dict[str, Shape], norm_offset: float) -> None:
        self._source, self._shapes, self._norm_offset = source, shapes, norm_offset

    def __call__(self, key: str) -> Tensor:
        """Return the tensor of `key`, [out, in] or [n]. Raises ModelError."""
        shape = tuple(size.value for size in logical_shape(key, self._shapes))
        if len(shape) == 1:
            vector = self._source.vector(key, shape[0]).float()
            return vector + self._norm_offset if is_norm(key) else vector
        weight = self._source.weight(Shard.whole(key, (shape[0], shape[1])))
        return Stacked((weight,)).dense(torch.float32, _CPU)


def is_norm(key: str) -> bool:
    """Whether a logical key is the weight of a norm."""
    return key.endswith("norm")
