"""Column- and row-parallel linear layers over a seam for the storage format of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from services.worker.kernels.bfloat16 import TILE_K, Bfloat16Kernels
from services.worker.loading.checkpoint import Checkpoint, Span
from services.worker.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Shard:
    """One projection's share in a merged linear layer: `rows` and `cols` of the stored [shape] matrix `key`."""

    key: str
    shape: tuple[int, int]  # [out, in] of the whole matrix
    rows: Span
    cols: Span


class LinearMethod(Protocol):
    """How one linear layer stores and multiplies its weight. A quantized format is another implementation."""

    min_rows: int  # fewer are padded by `apply`; a caller with many layers pads once instead

    def create(self, n_out: int, n_in: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate this rank's weight [n_out, n_in]."""
        ...

    def load(self, source: Checkpoint, shard: Shard, offset: int) -> None:
        """Read `shard` into the output rows from `offset` on."""
        ...

    def process_after_load(self, bias: torch.Tensor | None) -> None:
        """Bring the weight into the layout that `apply` wants. `bias`: [n_out]."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        ...

    def apply_wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same in float32: not rounded to the dtype first, where the kernel can do without."""
        ...


MakeMethod = Callable[[], LinearMethod]


class PlainLinear:
    """An unquantized weight, multiplied by `torch.nn.functional.linear`."""

    min_rows = 1

    def create(self, n_out: int, n_in: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate this rank's weight [n_out, n_in]."""
        self._weight = torch.empty(n_out, n_in, dtype=dtype, device=device)
        self._bias: torch.Tensor | None = None

    def load(self, source: Checkpoint, shard: Shard, offset: int) -> None:
        """Copy `shard` into the output rows from `offset` on."""
        part = source.matrix(shard.key, shard.shape, shard.rows, shard.cols)
        self._weight[offset : offset + len(shard.rows)].copy_(part)

    def process_after_load(self, bias: torch.Tensor | None) -> None:
        """Keep the weight as it is."""
        self._bias = bias

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return F.linear(x, self._weight, self._bias)

    def apply_wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same in float32, after it was rounded to the dtype of the weight."""
        return self.apply(x).float()


class PackedLinear(PlainLinear):
    """An unquantized weight in oneDNN's blocked layout (CPU), whose rows do not depend on their neighbours.

    Measured with oneDNN 3.12: with its AVX2 and its AVX512 kernels rows are bitwise equal for every number of rows from
    2 on; AVX512 sums a lone row in another order, hence the padding. Its AMX kernels, which may cut K by the number of
    rows, are never met: where the operating system grants tile registers, `KernelLinear` serves bfloat16.
    """

    min_rows = 2

    def __init__(self) -> None:
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def process_after_load(self, bias: torch.Tensor | None) -> None:
        """Reorder the weight once."""
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        n = x.shape[0]
        if n < self.min_rows:
            return self.apply(F.pad(x, (0, 0, 0, self.min_rows - n)))[:n]
        return self._multiply(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]


class KernelLinear(PlainLinear):
    """An unquantized bfloat16 weight, packed for our own kernel."""

    def __init__(self, kernels: Bfloat16Kernels) -> None:
        self._kernels = kernels

    def process_after_load(self, bias: torch.Tensor | None) -> None:
        """Pack the weight once."""
        self._n_out, n_in = self._weight.shape
        self._missing = -n_in % TILE_K
        self._weight = self._kernels.pack(F.pad(self._weight, (0, self._missing)))
        self._bias = None if bias is None else bias.float()
        self._spare = self._kernels.spare(n_in + self._missing)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return self._multiply(x, torch.bfloat16)

    def apply_wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums in float32 as they are."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._missing:
            x = F.pad(x, (0, self._missing))
        out = torch.empty(x.shape[0], self._n_out, dtype=dtype)
        self._kernels.linear(x, self._weight, self._bias, out, self._spare)
        return out


def choose_method(dtype: torch.dtype, device: torch.device, kernels: Bfloat16Kernels | None = None) -> MakeMethod:
    """Return the fastest unquantized method for this machine: our kernels, else oneDNN's on CPU where there are any."""
    if kernels is not None:
        return lambda: KernelLinear(kernels)
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainLinear
    packed = dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return PackedLinear if packed else PlainLinear


@dataclass(frozen=True, slots=True)
class LinearLoader:
    """Builds linear layers of one rank from a checkpoint."""

    source: Checkpoint
    comm: Communicator
    dtype: torch.dtype
    device: torch.device
    make: MakeMethod
    kernels: Bfloat16Kernels | None = None

    def share(self, size: int) -> Span:
        """Return this rank's share of a dimension that the ranks divide."""
        step = size // self.comm.size
        return Span(self.comm.rank * step, (self.comm.rank + 1) * step)

    def column_parallel(self, keys: Sequence[str], n_out: int, n_in: int) -> LinearMethod:
        """Merge projections of `n_out` rows each whose outputs the ranks divide. No collective follows."""
        rows, cols = self.share(n_out), Span(0, n_in)
        return self.build([Shard(key, (n_out, n_in), rows, cols) for key in keys])

    def row_parallel(self, key: str, n_out: int, n_in: int) -> LinearMethod:
        """Load a projection whose inputs the ranks divide: its outputs must be all-reduced. Rank 0 adds the bias."""
        return self.build([Shard(key, (n_out, n_in), Span(0, n_out), self.share(n_in))], bias=self.comm.rank == 0)

    def replicated(self, key: str, n_out: int, n_in: int) -> LinearMethod:
        """Load a projection that every rank computes in full."""
        return self.build([Shard(key, (n_out, n_in), Span(0, n_out), Span(0, n_in))])

    def build(self, shards: Sequence[Shard], *, bias: bool = True, n_padding: int = 0) -> LinearMethod:
        """Merge `shards` by rows, below them `n_padding` rows of unspecified values."""
        method = self.make()
        n_out = sum(len(shard.rows) for shard in shards)
        method.create(n_out + n_padding, len(shards[0].cols), self.dtype, self.device)
        offset = 0
        for shard in shards:
            method.load(self.source, shard, offset)
            offset += len(shard.rows)
        method.process_after_load(self._bias(shards) if bias else None)
        return method

    def _bias(self, shards: Sequence[Shard]) -> torch.Tensor | None:
        keys = [(f"{shard.key}.bias", shard) for shard in shards]
        if keys[0][0] not in self.source:
            return None
        parts = [self.source.vector(key, shard.shape[0], shard.rows) for key, shard in keys]
        return torch.cat(parts).to(self.device, self.dtype)
