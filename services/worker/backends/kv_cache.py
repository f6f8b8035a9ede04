"""The paged KV cache of one rank."""

from __future__ import annotations

import torch


class KvCache:
    """K and V of every layer in blocks; block 0 is the null block: always zero, read where there is no key.

    K and V of a token lie side by side, so that one copy writes and one gather reads both. `k[layer]` and `v[layer]`
    are views [n_blocks + 1, block_size, n_kv_heads, head_dim] of `kv[layer]`, and `rows[layer]` is
    [(n_blocks + 1) * block_size, 2 * n_kv_heads * head_dim].
    """

    def __init__(
        self,
        n_layers: int,
        n_blocks: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`n_kv_heads`: of this rank."""
        self.n_blocks, self.block_size = n_blocks, block_size
        shape = (n_blocks + 1, block_size, 2, n_kv_heads, head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self.k = [kv[:, :, 0] for kv in self.kv]
        self.v = [kv[:, :, 1] for kv in self.kv]
        self.rows = [kv.view(shape[0] * shape[1], -1) for kv in self.kv]

    def gather(self, layer: int, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read `slots` [n]: [n, 2 * n_kv_heads * head_dim], K then V; into `out` where given."""
        return torch.index_select(self.rows[layer], 0, slots, out=out)
