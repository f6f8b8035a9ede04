"""Paged attention on CUDA by our Triton kernels: any block size, cost by the sequences' real lengths."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch, long_tensor
from services.compute.backends.cuda.small import power_of_two
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import Coding, rotated
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.pages import LAST

SPLIT_KEYS = 256  # keys of a decode's program: enough programs for one row, few parts to merge for many rows
_MERGED = 16  # splits that are added up at a time
_MIN_LANES = 16  # rows of the smallest product on tensor cores
_EVERYTHING = 1 << 30  # a window that no sequence fills
_LARGEST_HEAD = 256
_SUMMARIES = 32  # blocks whose summaries a program reads


@dataclass(frozen=True, slots=True)
class Blocking:
    """The tile that one program computes; the kernels are compiled for it."""

    n_dims: int  # head size, padded to a power of two
    n_members: int  # heads of a group, padded to a power of two
    decode_members: int  # the same for `decode`, which has no other rows to fill a product with
    tile_rows: int  # rows of a prefill's tile
    n_keys: int  # that a prefill reads at a time
    decode_keys: int
    warps: int  # warps of a prefill's program

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, *, coded: bool) -> Blocking:
        """Return the blocking for heads of `shape` in `dtype`: what fits the memory and registers of a GPU of 2020.

        `coded`: the cache holds codes, which take registers to convert.
        """
        n_dims, n_members = max(16, power_of_two(shape.head_dim)), power_of_two(shape.group)
        large = n_dims > 128 or dtype is torch.float32 or coded
        lanes = max(n_members, 32 if dtype is torch.float32 else 64 if large else 128)
        n_keys = 16 if dtype is torch.float32 and n_dims > 128 else 32 if large else 64
        decode_keys = 2 * n_keys if coded and n_keys < 64 and n_dims <= 128 else n_keys
        warps = 4 if lanes < 128 else 8
        return cls(n_dims, n_members, max(_MIN_LANES, n_members), lanes // n_members, n_keys, decode_keys, warps)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One step's work for one window. The first `len(lengths)` sequences have one row each."""

    n_rows: int  # rows with results: all others are set to zero first
    lengths: Tensor  # [n_decode] int64; 0: there is no such sequence
    tables: Tensor  # [n_sequences, max_blocks] int64; of decodes that have chosen [n_decode, n_kv_heads, max_blocks]
    n_splits: int  # splits of the longest decode
    window: int
    tiles: Tensor  # [n_tiles, 4] int32: sequence, first row, number of rows (0: no tile), position
    pages: Tensor | None = None  # [n_decode] int64, most blocks that each KV head reads, 0: all; None: all of every row


class PagedTriton:
    """Two kernels: for sequences with one row, whose keys are divided among programs, and for tiles of rows.

    A row's bits depend on its own sequence, and on whether it is alone in its chunk.
    """

    exact_chunks = False  # `prefill` sums in another order than `decode`

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, coding: Coding | None = None
    ) -> None:
        """`coding`: the cache holds such codes, of 8 bits; None: numbers of `dtype`.

        Raises ValueError for heads that the kernels do not support, ImportError without Triton.
        """
        # Imported here, because CPUs do not have it.
        from services.compute.backends.cuda.kernels import attention, pages

        if shape.head_dim > _LARGEST_HEAD:
            raise ValueError(f"heads of {shape.head_dim} numbers are larger than {_LARGEST_HEAD}")
        self._kernels, self._pages, self._shape, self._coding = attention, pages, shape, coding
        self._blocking = Blocking.of(shape, dtype, coded=coding is not None)
        self.tile_rows = self._blocking.tile_rows
        self._slopes = torch.tensor(shape.slopes, dtype=torch.float32, device=device)  # [n_heads] or [0]
        # The rotation of codes of keys, times a factor that makes its numbers 1, -1 and 0.
        turns = rotated(torch.eye(shape.head_dim))
        self._turned = float(turns.abs().max())
        self._turns = turns.sign().to(device, dtype)  # [head_dim, head_dim]
        sinks = torch.tensor(shape.sinks, dtype=torch.float32, device=device)
        # [n_layers, n_heads or a few more] or [0]: all layers begin at multiples of 16 bytes, as one kernel takes them.
        self._sinks = F.pad(sinks, (0, -shape.n_heads % 4)) if shape.sinks else sinks

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> PagedLayout:
        """Lay out the step's work for layers with `window`."""
        tiles = torch.from_numpy(prompt_tiles(batch, self.tile_rows))
        device, pages = batch.block_tables.device, batch.pages[: batch.n_decode]
        return PagedLayout(
            n_rows=batch.query_starts[-1],
            lengths=batch.device_lengths()[: batch.n_decode],
            tables=batch.block_tables,
            n_splits=_n_splits(max(batch.context_lens[: batch.n_decode], default=0), window),
            window=window or _EVERYTHING,
            tiles=tiles.to(device, non_blocking=True),
            pages=long_tensor(pages).to(device, non_blocking=True) if any(pages) else None,
        )

    def decode_plan(
        self, lengths: Tensor, block_tables: Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> PagedLayout:
        """Lay out a step with one row per sequence from tensors on the device, so that it can be captured and replayed.

        `lengths` [n] are at most `n_keys`; `block_tables` [n, max_blocks].
        """
        splits, tiles = _n_splits(n_keys, window), lengths.new_empty((0, 4), dtype=torch.int32)
        return PagedLayout(len(lengths), lengths, block_tables, splits, window or _EVERYTHING, tiles)

    def mixed_plan(
        self, lengths: Tensor, tables: Tensor, tiles: Tensor, n_keys: int, window: int | None
    ) -> PagedLayout:
        """Lay out any step from tensors on the device, so that it can be captured and replayed.

        The first sequences are decodes with `lengths` [n] keys, at most `n_keys`; `tiles` [n_tiles, 4] are those of the
        others. Rows of no sequence get zeros.
        """
        return PagedLayout(0, lengths, tables, _n_splits(n_keys, window), window or _EVERYTHING, tiles)

    def n_rows(self, plan: PagedLayout) -> int:
        """Rows of `q` that `attend` reads."""
        return plan.n_rows

    def attend(self, q: Tensor, cache: KvCache, layer: int, plan: PagedLayout) -> Tensor:
        """Attend with `q` [n_rows or more, n_heads * head_dim]; returns the same shape.

        Raises RuntimeError if a kernel cannot be compiled, or Triton's launcher, for which it calls a C compiler.
        """
        queries = q
        if self._coding is not None:
            q = (q.reshape(-1, self._shape.head_dim) @ self._turns).view(q.shape)
        out = q.new_empty(q.shape)
        out[plan.n_rows :].zero_()
        sinks = self._sinks[layer] if self._shape.sinks else self._sinks
        try:
            if len(plan.lengths):
                decodes = plan if plan.pages is None else self._choose(queries, cache, layer, plan, plan.pages)
                self._decode(q, out, cache, layer, decodes, sinks)
            if len(plan.tiles):
                self._prefill(q, out, cache, layer, plan, sinks)
        except (self._kernels.TritonError, subprocess.CalledProcessError, OSError, AssertionError) as error:
            raise RuntimeError(f"Triton: {error}") from error
        return out

    def _choose(self, q: Tensor, cache: KvCache, layer: int, plan: PagedLayout, pages: Tensor) -> PagedLayout:
        """Return the decodes with the blocks that `choose_pages` chooses, for each KV head; the host does not wait."""
        shape, size, n = self._shape, cache.block_tokens, len(plan.lengths)
        tables, width = plan.tables[:n], plan.tables.shape[1]
        expected = torch.empty((n, shape.n_heads, width), dtype=torch.float32, device=q.device)
        self._pages.expect[(n, shape.n_kv_heads, -(-width // _SUMMARIES))](
            q,
            cache.summaries[layer],
            tables,
            plan.lengths,
            pages,
            expected,
            q.stride(0),
            tables.stride(0),
            width,
            block_tokens=size,
            n_kv_heads=shape.n_kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            n_dims=self._blocking.n_dims,
            n_pages=_SUMMARIES,
            num_warps=4,
        )
        counts, pages = ((plan.lengths + size - 1) // size).view(n, 1, 1), pages.view(n, 1, 1)
        places = torch.arange(width, device=q.device)
        last = (places >= counts - LAST) & (places < counts)
        expected.masked_fill_((places == 0) | (places >= counts - LAST), -torch.inf)
        below = (expected - expected.amax(-1, keepdim=True)).view(n, shape.n_kv_heads, shape.group, width)
        scores = below.amax(2).masked_fill_((places == 0) | last, torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices
        ordered = best.masked_fill_(places >= pages, width - 1).sort(dim=-1).values
        chooses = (pages > 0) & (counts > pages)
        every = tables.unsqueeze(1).expand(-1, shape.n_kv_heads, -1)
        chosen = torch.where(chooses, every.gather(2, ordered), every)
        lengths = torch.where(chooses, plan.lengths.view(n, 1, 1) - (counts - pages) * size, plan.lengths.view(n, 1, 1))
        return replace(plan, tables=chosen, lengths=lengths.flatten(), pages=None)

    def _decode(self, q: Tensor, out: Tensor, cache: KvCache, layer: int, plan: PagedLayout, sinks: Tensor) -> None:
        codes, scales = self._parts(cache, layer)
        shape, blocking, n = self._shape, self._blocking, len(plan.lengths)
        direct = plan.n_splits == 1
        n_parts = 0 if direct else n * shape.n_heads * plan.n_splits
        parts = torch.empty((n_parts, shape.head_dim), dtype=torch.float32, device=q.device)
        weights = torch.empty((n_parts, 2), dtype=torch.float32, device=q.device)
        self._kernels.decode[(n, shape.n_kv_heads, plan.n_splits)](
            q,
            out,
            parts,
            weights,
            codes,
            scales,
            plan.tables,
            plan.lengths,
            self._slopes,
            sinks,
            q.stride(0),
            plan.tables.stride(0),
            plan.tables.stride(1) if plan.tables.dim() == 3 else 0,
            plan.window,
            plan.n_splits,
            **self._common(cache),
            n_members=blocking.decode_members,
            n_keys=blocking.decode_keys,
            split_keys=SPLIT_KEYS,
            direct=direct,
            num_warps=4,
        )
        if not direct:
            self._kernels.merge[(n, shape.n_heads)](
                out,
                parts,
                weights,
                plan.lengths,
                sinks,
                plan.window,
                plan.n_splits,
                n_heads=shape.n_heads,
                head_dim=shape.head_dim,
                n_dims=blocking.n_dims,
                n_merged=_MERGED,
                split_keys=SPLIT_KEYS,
                has_sinks=bool(shape.sinks),
                num_warps=4,
            )

    def _prefill(self, q: Tensor, out: Tensor, cache: KvCache, layer: int, plan: PagedLayout, sinks: Tensor) -> None:
        codes, scales = self._parts(cache, layer)
        self._kernels.prefill[(len(plan.tiles), self._shape.n_kv_heads)](
            q,
            out,
            codes,
            scales,
            plan.tables,
            plan.tiles,
            self._slopes,
            sinks,
            q.stride(0),
            plan.tables.stride(0),
            plan.window,
            **self._common(cache),
            n_members=self._blocking.n_members,
            n_keys=self._blocking.n_keys,
            tile_rows=self._blocking.tile_rows,
            num_warps=self._blocking.warps,
        )

    def _parts(self, cache: KvCache, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer as numbers or codes, and as the scales of codes."""
        numbers = cache.layers[layer]
        if self._coding is None:
            return numbers, numbers
        return numbers.view(self._coding.codes), numbers.view(torch.bfloat16)

    def _common(self, cache: KvCache) -> dict[str, float]:
        """Return the arguments that both kernels have."""
        coded = self._coding is not None
        shape, blocking = self._shape, self._blocking
        return {
            "scale": shape.scale * (self._turned if coded else 1.0),
            "softcap": shape.softcap or 1.0,
            "block_tokens": cache.block_tokens,
            "n_kv_heads": shape.n_kv_heads,
            "group": shape.group,
            "head_dim": shape.head_dim,
            "n_dims": blocking.n_dims,
            "has_softcap": shape.softcap is not None,
            "has_slopes": bool(shape.slopes),
            "has_sinks": bool(shape.sinks),
            "coded": coded,
        }


def prompt_tiles(batch: StepBatch, tile_rows: int) -> NDArray[np.int32]:
    """Return the tiles of the sequences with several rows, those with the most keys first: [n_tiles, 4].

    Of each its sequence, first row, number of rows and first position.
    """
    tiles = []
    for sequence in range(batch.n_decode, batch.n_sequences):
        first, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        to_position = batch.context_lens[sequence] - end
        tiles += [(sequence, row, min(tile_rows, end - row), row + to_position) for row in range(first, end, tile_rows)]
    return np.array(sorted(tiles, key=lambda tile: -tile[3]), np.int32).reshape(-1, 4)


def _n_splits(n_keys: int, window: int | None) -> int:
    """Return the number of splits that a row with `n_keys` keys may need."""
    every = -(-n_keys // SPLIT_KEYS)
    return every if window is None else min(every, -(-(window - 1) // SPLIT_KEYS) + 1)
