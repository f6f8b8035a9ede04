"""The paged KV cache of one rank."""

from __future__ import annotations

import torch

from services.worker.kernels.bfloat16 import Bfloat16Kernels
from services.worker.model.spec import ModelSpec
from services.worker.parallel.communicator import Communicator


class KvCache:
    """K and V of every layer in blocks; block 0 is the null block: always zero, read where there is no key.

    K and V of a token lie side by side, so that one copy writes and one gather reads both. `k[layer]` and
    `v[layer]` are views [n_blocks + 1, block_size, n_kv_local, head_dim] of `kv[layer]`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        comm: Communicator,
        n_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Bfloat16Kernels | None = None,
    ) -> None:
        self._kernels = kernels
        n_kv_local = spec.kv_heads_per_rank(comm.size)
        self._allocate(spec.n_layers, (n_blocks + 1, block_size, 2, n_kv_local, spec.head_dim), dtype, device)

    @classmethod
    def of_shape(
        cls,
        n_layers: int,
        n_blocks: int,
        block_size: int,
        n_kv_local: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvCache:
        """Return a cache for no model in particular."""
        cache = cls.__new__(cls)
        cache._kernels = None
        cache._allocate(n_layers, (n_blocks + 1, block_size, 2, n_kv_local, head_dim), dtype, device)
        return cache

    def _allocate(
        self, n_layers: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_blocks, self.block_size = shape[0] - 1, shape[1]
        self.n_kv_local, self.head_dim = shape[3], shape[4]
        self.kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self.k = [kv[:, :, 0] for kv in self.kv]
        self.v = [kv[:, :, 1] for kv in self.kv]
        # [(n_blocks + 1) * block_size, 2 * n_kv_local * head_dim]
        self._rows = [kv.view(shape[0] * shape[1], -1) for kv in self.kv]

    @staticmethod
    def bytes_per_token(spec: ModelSpec, size: int, dtype: torch.dtype) -> int:
        """Bytes that one of `size` ranks stores for a token, over all layers."""
        return 2 * spec.n_layers * spec.kv_heads_per_rank(size) * spec.head_dim * dtype.itemsize

    def write(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write `rows` [n, 2 * n_kv_local * head_dim], K then V, to `slots` [n]."""
        if self._kernels is not None:
            self._kernels.write_rows(self._rows[layer], slots, rows)
        else:
            self._rows[layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read `slots` [n]: [n, 2 * n_kv_local * head_dim], K then V; into `out` where given."""
        return torch.index_select(self._rows[layer], 0, slots, out=out)
