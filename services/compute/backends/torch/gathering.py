"""Paged attention: gathers keys for torch's flash kernel, in shapes where a row's bits do not depend on its batch.

It serves devices, architectures and head sizes that our own kernels do not support.

Measured on CPUs with torch 2.13 and AVX512 (AVX2 does not have these properties, but our kernels serve there): the
kernel processes keys in blocks of 512 from the first given key. A row's result is bitwise independent of other rows and
of masked keys at the end if the number of keys is a multiple of 64 and the number of query rows is even; a single row
takes another path. In float32 the number of rows must be a multiple of 8 (of 16 if head_dim > 128), and the last block
must have at most 256 keys or all 512, because MKL divides sums over more than 384 terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.compute.backends.batch import StepBatch
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.torch.attention import ReferenceAttention, ReferencePlan
from services.compute.backends.torch.experts import sigmoid

_KEY_MULTIPLE = 64
_KEY_BLOCK = 512  # a window skips whole blocks of the kernel only, so that sums keep their order
_TILE_ROWS = 256  # prefill rows per call; a tile does not attend to keys of later tiles
_WORKSPACE_BYTES = 1 << 20  # larger gathers on a CPU reuse memory: new pages cost several times the copy (measured)
_MERGE_BYTES = 128 << 10  # padding keys up to this size cost less than one more call per layer (about 20 us)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one row each, attended in one call."""

    rows: slice | torch.Tensor  # rows within the step
    slots: torch.Tensor  # [n_sequences * n_keys]
    mask: torch.Tensor  # [n_sequences, 1, 1, n_keys], additive; with ALiBi [n_sequences, n_kv, n_padded, n_keys]


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive rows of one sequence."""

    first: int
    n_rows: int
    n_padded: int  # rows read; results of rows beyond n_rows, which belong to other sequences, are dropped
    slots: torch.Tensor  # [n_keys]
    mask: torch.Tensor  # [n_padded, n_keys], additive; with ALiBi [n_kv, group, n_padded, n_keys]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One step's calls for one window."""

    n_rows: int
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillTile, ...]
    choosing: tuple[torch.Tensor, ReferencePlan] | None = None  # rows that choose their blocks, and a step of them


class PagedSdpa:
    """Gathers each call's keys from the paged cache and runs scaled_dot_product_attention on them."""

    exact_chunks = False  # other versions of torch, and CPUs without AVX512, are not measured

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._reference = ReferenceAttention(shape)
        eights = 16 if shape.head_dim > 128 else 8
        self._row_multiple = eights if dtype is torch.float32 else 2
        self._zero = torch.zeros((), dtype=dtype, device=device)
        self._minus_infinity = self._zero - torch.inf
        self._workspace = torch.empty(0, 2 * shape.n_kv_heads * shape.head_dim, dtype=dtype, device=device)
        self._group_padding = -shape.group % self._row_multiple
        self._slopes: torch.Tensor | None = None  # [n_kv, group]
        if shape.slopes:
            self._slopes = torch.tensor(shape.slopes, device=device).view(shape.n_kv_heads, shape.group)
        self._sinks: torch.Tensor | None = None  # [n_layers, n_kv, group]
        if shape.sinks:
            self._sinks = torch.tensor(shape.sinks, device=device).view(-1, shape.n_kv_heads, shape.group)
        self._key_bytes = 2 * shape.n_kv_heads * shape.head_dim * dtype.itemsize

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> PagedPlan:
        """Lay out the step's calls for layers with `window`."""
        decode = tuple(self._decode_groups(batch, block_tokens, window))
        prefill = tuple(
            tile
            for index in range(batch.n_decode, batch.n_sequences)
            for tile in self._prefill_tiles(batch, index, block_tokens, window)
        )
        n_rows = max([batch.query_starts[-1], *(tile.first + tile.n_padded for tile in prefill)])
        rows = [index for index, most in enumerate(batch.pages) if most]
        choosing = None
        if rows:
            indices, alone = batch.alone(rows)
            choosing = indices, self._reference.plan(alone, block_tokens, window)
        return PagedPlan(n_rows, decode, prefill, choosing)

    def decode_plan(
        self, lengths: torch.Tensor, block_tables: torch.Tensor, n_keys: int, block_tokens: int, window: int | None
    ) -> PagedPlan:
        """Lay out a step with one row per sequence from tensors on the device, so that it can be captured and replayed.

        `lengths` [n] are at most `n_keys`; `block_tables` [n, max_blocks].
        """
        limits = lengths.unsqueeze(1)
        slots, keys = _slots(block_tables, [], limits, n_keys, block_tokens)
        group = DecodeGroup(slice(0, len(lengths)), slots.flatten(), self._decode_mask(keys, limits, window))
        return PagedPlan(len(lengths), (group,), ())

    def n_rows(self, plan: PagedPlan) -> int:
        """Rows of `q` that `attend` may read."""
        return plan.n_rows

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: PagedPlan) -> torch.Tensor:
        """Attend with `q` [n_rows, n_heads * head_dim]; returns the same shape."""
        out = self._attend_all(q, cache, layer, plan)
        if plan.choosing is not None:  # few: their keys are gathered head by head
            rows, alone = plan.choosing
            out[rows] = self._reference.attend(q[rows], cache, layer, alone)
        return out

    def _attend_all(self, q: torch.Tensor, cache: KvCache, layer: int, plan: PagedPlan) -> torch.Tensor:
        if not plan.prefill and len(plan.decode) == 1:
            padding = len(q) - plan.n_rows
            attended = self._decode(q[: plan.n_rows] if padding else q, cache, layer, plan.decode[0])
            return F.pad(attended, (0, 0, 0, padding)) if padding else attended
        out = q.new_zeros(q.shape)
        for group in plan.decode:
            out[group.rows] = self._decode(q[group.rows], cache, layer, group)
        for tile in plan.prefill:
            self._prefill(q, out, cache, layer, tile)
        return out

    def _decode(self, q: torch.Tensor, cache: KvCache, layer: int, group: DecodeGroup) -> torch.Tensor:
        shape, n = self._shape, len(q)
        kv = self._gather(cache, layer, group.slots).view(n, -1, 2, shape.n_kv_heads, shape.head_dim)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()  # [n, n_kv, n_keys, head_dim]
        heads = q.view(n, shape.n_kv_heads, shape.group, shape.head_dim)  # the group takes the place of rows
        sinks = None if self._sinks is None else self._sinks[layer]
        if not self._group_padding:
            return self._sdpa(heads, k, v, group.mask, sinks).reshape(n, -1)
        sinks = None if sinks is None else F.pad(sinks, (0, self._group_padding))
        attended = self._sdpa(F.pad(heads, (0, 0, 0, self._group_padding)), k, v, group.mask, sinks)
        return attended[:, :, : shape.group].reshape(n, -1)

    def _prefill(self, q: torch.Tensor, out: torch.Tensor, cache: KvCache, layer: int, tile: PrefillTile) -> None:
        shape = self._shape
        grouped = (-1, shape.n_kv_heads, shape.group, shape.head_dim)
        kv = self._gather(cache, layer, tile.slots).view(-1, 2, shape.n_kv_heads, 1, shape.head_dim)
        k, v = kv.permute(1, 2, 3, 0, 4).expand(-1, -1, shape.group, -1, -1)  # [n_kv, group, n_keys, head_dim] each
        rows = q[tile.first : tile.first + tile.n_padded].view(grouped).permute(1, 2, 0, 3)
        sinks = None if self._sinks is None else self._sinks[layer].unsqueeze(-1)
        attended = self._sdpa(rows, k, v, tile.mask, sinks)  # [n_kv, group, n_padded, head_dim]
        last = tile.first + tile.n_rows
        out[tile.first : last].view(grouped).copy_(attended[:, :, : tile.n_rows].permute(2, 0, 1, 3))

    def _gather(self, cache: KvCache, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return [n_keys, 2 * n_kv * head_dim]; large results in a workspace that the next call overwrites."""
        n_keys = len(slots)
        if self._device.type != "cpu" or n_keys * self._key_bytes < _WORKSPACE_BYTES:
            return cache.gather(layer, slots)
        if n_keys > len(self._workspace):
            self._workspace = self._workspace.new_empty(n_keys + n_keys // 2, self._workspace.shape[1])
        return cache.gather(layer, slots, self._workspace[:n_keys])

    def _sdpa(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with q [n, heads, n_rows, head_dim]; `sinks` is broadcast against [n, heads, n_rows]."""
        shape = self._shape
        if sinks is not None:
            return self._with_sinks(q, k, v, mask, sinks)
        if shape.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)
        # The kernel has no soft-cap, so the capped scores are the mask of a product of zeros.
        scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(shape.scale / shape.softcap)
        scores = scores.tanh_().mul_(shape.softcap).to(q.dtype) + mask
        return F.scaled_dot_product_attention(torch.zeros_like(q), k, v, attn_mask=scores)

    def _with_sinks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Attend with one more key of score `sinks` and value 0: it takes its share from the other keys' weights."""
        scale = self._shape.scale
        attended: torch.Tensor
        if self._device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            attended, mass = kernel(q, k, v, attn_mask=mask, scale=scale)  # mass: logsumexp of the scores, float32
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            mass = (torch.matmul(q, k.mT).float() * scale + mask).logsumexp(dim=-1)
        return attended * sigmoid(mass - sinks).unsqueeze(-1).to(q.dtype)

    def _decode_groups(self, batch: StepBatch, block_tokens: int, window: int | None) -> Iterator[DecodeGroup]:
        lengths = batch.context_lens[: batch.n_decode]
        starts = [_first_key(length - 1, window, block_tokens) for length in lengths]
        sizes = [self._n_keys(length - start) for length, start in zip(lengths, starts, strict=True)]
        groups = _group(sizes, self._key_bytes)
        for members in groups:
            rows = slice(0, batch.n_decode) if len(groups) == 1 else torch.tensor(members, device=self._device)
            n_keys = max(sizes[i] for i in members)
            limits = torch.tensor([lengths[i] for i in members], device=self._device).unsqueeze(1)
            first = [starts[i] for i in members]
            slots, keys = _slots(batch.block_tables[rows], first, limits, n_keys, block_tokens)
            yield DecodeGroup(rows, slots.flatten(), self._decode_mask(keys, limits, window))

    def _decode_mask(self, keys: torch.Tensor, limits: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the mask of `keys` [n or 1, n_keys] at and beyond `limits` [n, 1], or before the window."""
        hidden = keys >= limits
        if window is not None:
            hidden |= keys < limits - window
        if self._slopes is None:
            return self._mask(hidden)[:, None, None]
        bias = self._slopes.unsqueeze(-1) * (keys - limits + 1)[:, None, None]  # [n, n_kv, group, n_keys]
        mask = self._mask(hidden[:, None, None], bias)
        return F.pad(mask, (0, 0, 0, self._group_padding)) if self._group_padding else mask

    def _prefill_tiles(
        self, batch: StepBatch, index: int, block_tokens: int, window: int | None
    ) -> Iterator[PrefillTile]:
        row, end = batch.query_starts[index], batch.query_starts[index + 1]
        length = batch.context_lens[index]
        table = batch.block_tables[index : index + 1]
        for first in range(row, end, _TILE_ROWS):
            n_rows = min(_TILE_ROWS, end - first)
            position = length - (end - first)  # position of the tile's first row
            yield self._tile(table, (first, n_rows, position), block_tokens, window)

    def frame_tiles(self, batch: StepBatch, block_tokens: int, window: int | None) -> tuple[PrefillTile, ...]:
        """Lay out the calls for the frames of a step."""
        tiles = []
        for frame in batch.images.frames if batch.images else ():
            table = batch.block_tables[frame.sequence : frame.sequence + 1]
            for done in range(0, frame.n_rows, _TILE_ROWS):
                left = frame.n_rows - done
                rows = frame.first + done, min(_TILE_ROWS, left), frame.end - left
                tiles.append(self._tile(table, rows, block_tokens, window, frame.end))
        return tuple(tiles)

    def rows_of_tiles(self, tiles: tuple[PrefillTile, ...]) -> int:
        """Rows of `q` that `attend_tiles` may read."""
        return max((tile.first + tile.n_padded for tile in tiles), default=0)

    def attend_tiles(
        self, q: torch.Tensor, out: torch.Tensor, cache: KvCache, layer: int, tiles: tuple[PrefillTile, ...]
    ) -> None:
        """Write the results of the tiles' rows to `out`."""
        for tile in tiles:
            self._prefill(q, out, cache, layer, tile)

    def _tile(
        self,
        table: torch.Tensor,
        of: tuple[int, int, int],
        block_tokens: int,
        window: int | None,
        end: int | None = None,
    ) -> PrefillTile:
        """Lay out the first row, the number of rows and the first one's position `of` a sequence.

        `end`: every row sees the keys before this position; None: those up to its own.
        """
        first, n_rows, position = of
        n_padded, limit = _round_up(n_rows, self._row_multiple), position + n_rows if end is None else end
        start = _first_key(position, window, block_tokens)
        limits = torch.tensor([[limit]], device=self._device)
        slots, keys = _slots(table, [start], limits, self._n_keys(limit - start), block_tokens)
        rows = torch.arange(position, position + n_padded, device=self._device).unsqueeze(1)
        hidden = keys > (rows if end is None else torch.full_like(rows, end - 1))
        if window is not None:
            hidden |= keys <= rows - window
        bias = None if self._slopes is None else self._slopes[..., None, None] * (keys - rows)
        return PrefillTile(first, n_rows, n_padded, slots[0], self._mask(hidden, bias))

    def _n_keys(self, needed: int) -> int:
        """Return the number of keys to attend over, at least `needed`."""
        padded = _round_up(needed, _KEY_MULTIPLE)
        if self._dtype is torch.float32 and padded % _KEY_BLOCK > _KEY_BLOCK // 2:
            return _round_up(needed, _KEY_BLOCK)
        return padded

    def _mask(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.where(hidden, self._minus_infinity, self._zero if bias is None else bias.to(self._dtype))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _first_key(position: int, window: int | None, block_tokens: int) -> int:
    """Return the first key to read for rows from `position` on."""
    unit = math.lcm(_KEY_BLOCK, block_tokens)
    return 0 if window is None else max(0, position - window + 1) // unit * unit


def _group(sizes: list[int], key_bytes: int) -> list[list[int]]:
    """Group sequences into calls, with equal numbers of keys or where padding costs little."""
    groups: list[list[int]] = []
    waste = 0
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        missing = sizes[groups[-1][0]] - sizes[index] if groups else 0
        if not groups or (waste + missing) * key_bytes > _MERGE_BYTES:
            groups.append([index])
            waste = 0
        else:
            groups[-1].append(index)
            waste += missing
    return groups if len(groups) != 1 else [list(range(len(sizes)))]


def _slots(
    tables: torch.Tensor, starts: list[int], limits: torch.Tensor, n_keys: int, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache slots and the positions of the `n_keys` keys from `starts` on, each [n, n_keys] or [1, n_keys].

    `starts` are positions at the start of blocks. Keys from `limits` [n, 1] on are read from the null block, so that
    stale data in unwritten slots has no effect.
    """
    device, n_blocks = tables.device, -(-n_keys // block_tokens)
    keys = torch.arange(n_keys, device=device).unsqueeze(0)
    if any(starts):
        first = torch.tensor(starts, device=device).unsqueeze(1)
        index = first // block_tokens + torch.arange(n_blocks, device=device)
        blocks = tables.gather(1, index.clamp_(max=tables.shape[1] - 1))
        keys = keys + first
    else:
        blocks = F.pad(tables[:, :n_blocks], (0, max(0, n_blocks - tables.shape[1])))
    slots = blocks.unsqueeze(-1) * block_tokens + torch.arange(block_tokens, device=device)
    return slots.flatten(1)[:, :n_keys].masked_fill(keys >= limits, 0), keys
