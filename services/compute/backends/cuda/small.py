"""The launches of `kernels/layer.py`: norms, rotations and draws, one kernel each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.compute.backends.cuda.logit_shard import CudaLogitShard
from services.compute.backends.draws import Chances

_DRAWN = 4096  # columns of a draw's program


class TritonRmsNorm:
    """RMS norm in one launch, for any weight, also in place."""

    def __init__(self, kernels: Any, weight: Tensor, eps: float) -> None:
        """`weight`: [size], or [groups, size] for x [n, groups, size]."""
        self._kernels, self._weight, self._eps = kernels, weight.float().contiguous(), eps
        self.adds = weight.dim() == 1  # `add` applies

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised `x`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.write(x, out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the normalised `x` to `out`, which may be `x`."""
        self._launch(x, out, None, 1.0)

    def add(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Add scale * added to `x` [n, size] in place; return the normalised sum."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, out, added.contiguous(), scale)
        return out

    def _launch(self, x: Tensor, out: Tensor, added: Tensor | None, scale: float) -> None:
        rows, outs = (tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (x, out))
        n, groups, size = rows.shape
        n_columns = power_of_two(size)
        self._kernels.norm[(n * groups,)](
            rows,
            rows if added is None else added,
            self._weight,
            outs,
            rows.stride(0),
            rows.stride(1),
            outs.stride(0),
            outs.stride(1),
            scale,
            self._eps,
            groups=groups,
            size=size,
            n_columns=n_columns,
            weight_stride=0 if self.adds else size,
            adds=added is not None,
            num_warps=1 if n_columns <= 256 else 4 if n_columns <= 4096 else 8,
        )


class TritonRotation:
    """Rotates heads in place, in one launch; or queries in place and keys on their way to the cache."""

    def __init__(self, kernels: Any, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        self._kernels, self._cos, self._sin, self._positions = kernels, cos, sin, positions

    @property
    def angles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines [max_positions, half], and the positions [n] of the rows."""
        return self._cos, self._sin, self._positions

    def __call__(self, heads: Tensor) -> None:
        """Rotate heads [n, n_heads, head_dim]."""
        self._launch(heads, heads, self._positions, 0, heads.shape[1], heads.shape[1])

    def store(self, table: Tensor, slots: Tensor, heads: Tensor) -> None:
        """Rotate the queries of `heads` [n, n_heads, head_dim]; write rotated keys, and values, to rows of `table`."""
        n_heads, n_kv = heads.shape[1], table.shape[1] // (2 * heads.shape[2])
        self._launch(heads, table, slots, len(slots), n_heads - 2 * n_kv, n_heads - n_kv)

    def _launch(
        self, heads: Tensor, table: Tensor, slots: Tensor, n_written: int, n_queries: int, n_rotated: int
    ) -> None:
        (n, n_heads, head_dim), half = heads.shape, self._cos.shape[1]
        rest = head_dim - 2 * half
        self._kernels.rotate[(n, n_heads)](
            heads,
            self._cos,
            self._sin,
            self._positions,
            table,
            slots,
            heads.stride(0),
            n_written,
            n_queries=n_queries,
            n_rotated=n_rotated,
            n_heads=n_heads,
            head_dim=head_dim,
            half=half,
            n_pairs=power_of_two(half),
            n_rest=power_of_two(rest) if rest else 0,
            num_warps=1,
        )


class TritonLogitShard(CudaLogitShard):
    """Scores, noise and the best token of a part of the columns in one launch."""

    def __init__(self, kernels: Any, first_id: int, n_columns: int, device: torch.device) -> None:
        super().__init__(first_id, n_columns, device)
        self._kernels = kernels

    def sample(self, logits: Tensor, chances: Chances) -> Tensor:
        """Return the key of each row's best score."""
        n, n_columns = logits.shape
        n_parts = -(-n_columns // _DRAWN)
        best = torch.empty((n, n_parts), dtype=torch.int64, device=logits.device)
        self._kernels.draw[(n, n_parts)](
            logits,
            chances.temperature,
            chances.seeds,
            chances.positions,
            best,
            logits.stride(0),
            self.first_id,
            n_columns,
            n_parts,
            part=_DRAWN,
            num_warps=4,
        )
        return best.amax(dim=-1)


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()
