"""A GPU's graphs on a CPU: what torch computes is recorded with its tensors, and computed again in the same places.

What the host decides while it records is decided for good, as in a CUDA graph, and it cannot ask the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.compute.backends.base import Attention, LowRank
from services.compute.backends.batch import AdapterRows
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.graph import Uploads
from services.compute.backends.cuda.low_rank import CudaLowRank
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.cuda.recorder import Recorder, Recording
from services.compute.backends.cuda.transfers import BufferLayout
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import KvFormat
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.states import ScanTokens, StatePlan
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.recurrent import TorchConvolution
from services.compute.backends.transfers import DirectTransfers, Numbers, Transfers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = [pytest.param(CPU, id="recorded"), pytest.param(CUDA, id="cuda", marks=on_gpu)]
_WAITING = ("tolist", "item", "numpy", "cpu", "nonzero", "unique", "masked_select", "__bool__", "__int__", "__index__")
_ASKING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::masked_select"}


class Unasked(TorchFunctionMode):
    """Raises RuntimeError for what would wait for a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _WAITING:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], list[Tensor]]] = []
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # before it was

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _ASKING:
            raise RuntimeError(f"{func} waits for the device")
        kwargs = kwargs or {}
        self._keep(func, args, kwargs)
        actual = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(actual)))
        return actual

    def _keep(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(args[place] if place < len(args) else kwargs.get(argument.name)):
                    storage = tensor.untyped_storage()
                    self._written.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def undo(self) -> None:
        for storage, before in self._written.values():
            storage.copy_(before, False)
        self._written.clear()

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            for old, new in zip(before, _tensors(func(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # else a view, or in place
                    old.copy_(new)


def _tensors(actual: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(actual) if isinstance(leaf, Tensor)]


@dataclass
class TapeRecorder:
    """Counts what it does."""

    n_probed: int = 0
    n_replayed: int = 0
    tapes: list[weakref.ref[_Tape]] = field(default_factory=list)

    def probe(self, compute: Callable[[], Tensor]) -> Tensor:
        self.n_probed += 1
        with Unasked():
            return compute()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record what is computed, and undo it: a graph computes nothing before it is replayed."""
        tape = _Tape()
        with Unasked(), tape:
            output = compute()
        tape.undo()
        self.tapes.append(weakref.ref(tape))

        def replay() -> None:
            self.n_replayed += 1
            tape.replay()

        return Recording(replay, output)


class Direct(DirectTransfers):
    """Copies of a CPU to itself."""

    def __init__(self) -> None:
        super().__init__(CPU)

    def up_to(self, arrays: Sequence[Numbers], place: Tensor) -> None:
        packing = BufferLayout.of(arrays)
        buffer = np.zeros(packing.size, np.uint8)
        packing.pack(arrays, buffer)
        place.copy_(torch.from_numpy(buffer))


class TapedLowRank(CudaLowRank):
    """The device finds the factors of each row by itself, as in Triton."""

    def add_(self, y: Tensor, x: Tensor, adapters: AdapterRows) -> None:
        slots = adapters.slots.clamp(min=0)
        inner = torch.einsum("ni,nri->nr", x, self.a[slots])
        y += torch.einsum("nr,nro->no", inner, self.b[slots]) * (adapters.slots >= 0).unsqueeze(1)


def _saved(state: Tensor, plan: StatePlan, compute: Callable[[StatePlan], Tensor]) -> Tensor:
    """Compute, and copy rows of `state` that the plan of a graph saves; its last row stands for none."""
    (turn, *others), spare = plan.turns, len(state) - 1
    if others or plan.runs:
        return compute(plan)
    rows, saves = (torch.where(column < 0, spare, column) for column in turn.segments[:, 2:].unbind(1))
    out = compute(replace(plan, singles=rows, saves=()))
    state.index_copy_(0, saves, state[rows])
    return out


class TapedConvolution(TorchConvolution):
    """The device finds the rows of states by itself, as in Triton."""

    def filtered(self, x: Tensor, state: Tensor, plan: StatePlan) -> Tensor:
        return _saved(state, plan, lambda inner: super(TapedConvolution, self).filtered(x, state, inner))


class TapedOps(CudaOps):
    """CUDA's operations without Triton. The device finds the rows of states by itself, as in Triton."""

    @property
    def replays_states(self) -> bool:
        return True

    def convolution(self, weight: Tensor, bias: Tensor | None) -> TapedConvolution:
        return TapedConvolution(weight, bias)

    def scan(self, tokens: ScanTokens, state: Tensor, plan: StatePlan) -> Tensor:
        return _saved(state, plan, lambda inner: super(TapedOps, self).scan(tokens, state, inner))

    @property
    def replays_adapters(self) -> bool:
        return True

    def low_rank(self, n_out: int, n_in: int, slots: int, max_rank: int) -> LowRank:
        return TapedLowRank(n_out, n_in, slots, max_rank, self._dtype, self._device)


@dataclass(frozen=True)
class LaidOut:
    """A step in tensors, as for our kernels on GPUs."""

    lengths: Tensor
    tables: Tensor
    tiles: Tensor
    window: int | None


class LaidOutAttention(ReferenceAttention):
    """The definition; steps that are replayed are laid out in tensors, and nothing of them is known to the host."""

    tile_rows = 8

    def mixed_plan(self, lengths: Tensor, tables: Tensor, tiles: Tensor, n_keys: int, window: int | None) -> LaidOut:
        assert tables.shape[1] * 16 >= n_keys
        return LaidOut(lengths, tables, tiles, window)

    def decode_plan(
        self, lengths: Tensor, block_tables: Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> LaidOut:
        return LaidOut(lengths, block_tables, torch.zeros(0, 4, dtype=torch.int32), window)

    def attend(self, q: Tensor, cache: KvCache, layer: int, plan: Any) -> Tensor:
        if not isinstance(plan, LaidOut):
            return super().attend(q, cache, layer, plan)
        sequences, positions = self._rows(plan, len(q))
        shape, n_keys = self._shape, plan.tables.shape[1] * cache.block_tokens
        keys = torch.arange(n_keys)
        slots = plan.tables[sequences][:, keys // cache.block_tokens] * cache.block_tokens + keys % cache.block_tokens
        kv = cache.gather(layer, slots.view(-1)).view(len(q), n_keys, 2, shape.n_kv_heads, shape.head_dim).float()
        k, v = (part.repeat_interleave(shape.group, 2) for part in kv.unbind(2))  # [n, n_keys, n_heads, head_dim]
        scores = torch.einsum("nhd,nkhd->nhk", q.view(len(q), shape.n_heads, -1).float(), k) * shape.scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        distance = positions.unsqueeze(1) - keys
        hidden = (distance < 0) | (distance >= (plan.window or n_keys))
        weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
        weights = weights.masked_fill((positions < 0).view(-1, 1, 1), 0)
        return torch.einsum("nhk,nkhd->nhd", weights, v).flatten(1).to(q.dtype)

    def _rows(self, plan: LaidOut, n: int) -> tuple[Tensor, Tensor]:
        """The sequence and the position of each row; -1: of no sequence."""
        sequences, positions = torch.zeros(n + 1, dtype=torch.int64), torch.full((n + 1,), -1)
        n_decodes, tiles = len(plan.lengths), plan.tiles.long()
        sequences[:n_decodes], positions[:n_decodes] = torch.arange(n_decodes), plan.lengths - 1
        of_tile = torch.arange(self.tile_rows)
        rows = torch.where(of_tile < tiles[:, 2:3], tiles[:, 1:2] + of_tile, n)
        sequences.index_put_((rows,), tiles[:, 0:1].expand_as(rows))
        positions.index_put_((rows,), tiles[:, 3:4] + of_tile)
        return sequences[:n], positions[:n]


class TapedBackend(CudaBackend):
    """CUDA's backend on a CPU, with the transfers of `device`."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: Any,
        kv_format: KvFormat | None = None,
        *,
        graphs: bool = True,
        mixed: bool = False,
    ) -> None:
        """`mixed`: steps with prompts are also replayed."""
        super().__init__(dtype, CPU, kv_format, triton=False, graphs=graphs)
        self._mixed = mixed
        self.ops = self._own = TapedOps(dtype, CPU)
        self.recorder = TapeRecorder()
        self.transfers: Transfers = device
        self._uploads: Uploads = device

    @property
    def _recorder(self) -> Recorder:  # type: ignore[override]
        return self.recorder

    def attention(self, shape: AttentionShape) -> Attention[Any]:
        return LaidOutAttention(shape) if self._mixed else super().attention(shape)
