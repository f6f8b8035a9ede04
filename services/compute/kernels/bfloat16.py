"""Our bfloat16 kernels for CPUs with tile registers (AMX), AVX-512, AVX2 or NEON, and the choice for this CPU.

A row's result does not depend on the other rows, bit for bit. All tensors are bfloat16 on CPU with contiguous last
dimensions unless stated otherwise; the kernels do not check shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_long, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.compute.cpu import has_amx, has_avx512, has_avx512_bf16, has_neon, has_neon_bf16, has_vectors
from services.compute.kernels.codes import SCALE_ROWS, Bits, InputBits, PackedCodes
from services.compute.kernels.library import FUNCTIONS, AttentionShape, Sequences, call_attention, open_library
from services.compute.kernels.recurrent import RecurrentKernels
from services.compute.kernels.signatures import REDUCE, REDUCE_ARGUMENTS

AMX, AVX512_BF16, AVX512, AVX2, NEON_BF16, NEON = (
    Path(__file__).with_name(f"librz_{name}.so")
    for name in ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon")
)
_MADE_FOR = {  # a name stands before its prefixes
    AMX.stem: "AMX tiles",
    AVX512_BF16.stem: "AVX-512 bfloat16",
    AVX512.stem: "AVX-512",
    AVX2.stem: "AVX2",
    NEON_BF16.stem: "NEON bfloat16",
    NEON.stem: "NEON",
}
TILE_K = 32  # n_in of linear layers is a multiple of TILE_K; so is head_dim with AMX
PACKED_ROWS = 64  # rows of a packed weight are padded to a multiple of PACKED_ROWS
HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256  # limits of head_dim
_TILE_ROWS = 16

# Functions that a step can consist of, with the kinds of their arguments, in the order of their numbers in replay.c.
REPLAYED = {**{f.name: f.kinds for f in FUNCTIONS if f.replayed}, REDUCE: REDUCE_ARGUMENTS}
Call = tuple[str, tuple[Any, ...]]  # name of a replayed function and its arguments


class StepSizes(NamedTuple):
    """Size of a step."""

    row_count: int
    sequence_count: int


class Collectives(ctypes.Structure):
    """A rank's position and progress in its group, as in collective.h. `area` and `beats` are addresses."""

    _fields_ = (
        ("area", c_void_p),
        *((name, c_long) for name in ("stride", "sizes", "payload", "room", "rank", "ranks")),
        *(("tag", c_uint64), ("rounds", c_uint64), ("beats", c_void_p), ("looks", c_long), ("elapsed_ns", c_uint64)),
    )


class _NotingLibrary:
    """Calls the library and records the calls of functions that can be replayed."""

    def __init__(self, library: ctypes.CDLL, calls: list[Call]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name not in REPLAYED:
            return function

        def call(*arguments: Any) -> None:
            self._calls.append((name, arguments))
            function(*arguments)

        return call


class Bfloat16Kernels(RecurrentKernels):
    """The compiled kernels, called with tensors."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.made_for = _MADE_FOR[name]
        self.amx = name == AMX.stem  # requires KV blocks of a multiple of 16 positions
        self.head_multiple = TILE_K if self.amx else HEAD_MULTIPLE
        self._library: ctypes.CDLL | _NotingLibrary = library

    @contextmanager
    def noted_in(self, calls: list[Call]) -> Iterator[None]:
        """Append the calls that can be replayed to `calls` inside this context."""
        library = self._library
        assert isinstance(library, ctypes.CDLL)
        self._library = _NotingLibrary(library, calls)
        try:
            yield
        finally:
            self._library = library

    def replay(self, calls: torch.Tensor, first: int, sizes: StepSizes, group: Collectives | None) -> int:
        """Call captured kernels from the call `first` on, in a step of the given sizes.

        `calls` [n, words] int64 are laid out as in replay.c. Returns n, or the index of a collective that the caller
        has to make before it continues with the next call: without `group` any collective, otherwise a collective
        for which other ranks are late.
        """
        address = None if group is None else ctypes.addressof(group)
        stopped: int = self._library.rz_replay(calls.data_ptr(), calls.shape[0], first, *sizes, address)
        return stopped

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` [n_out, n_in] in the layout of `linear`, with n_out padded; n_in is a multiple of 32."""
        return self.pack_blocks([weight], *weight.shape)

    def pack_blocks(self, blocks: Iterable[torch.Tensor], n_out: int, n_in: int) -> torch.Tensor:
        """Pack a weight [n_out, n_in] given as blocks of rows; each but the last has a multiple of PACKED_ROWS rows."""
        packed = torch.empty(-(-n_out // PACKED_ROWS) * PACKED_ROWS, n_in, dtype=torch.bfloat16)
        first = 0
        for block in blocks:
            self._library.rz_pack_weight(block.data_ptr(), len(block), n_in, packed[first:].data_ptr())
            first += len(block)
        return packed

    def unpack(self, packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows `rows` [n] int64 of a packed weight, bit-identical: [n, n_in]."""
        n, n_in = len(rows), packed.shape[1]
        out = torch.empty(n, n_in, dtype=torch.bfloat16)
        self._library.rz_unpack_rows(packed.data_ptr(), n_in, rows.data_ptr(), out.data_ptr(), n)
        return out

    def spare(self, n_in: int) -> torch.Tensor:
        """Return the buffer that `linear` needs for an incomplete tile of rows."""
        return torch.empty(_TILE_ROWS * n_in, dtype=torch.bfloat16)

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, spare: torch.Tensor
    ) -> None:
        """Write x W^T + bias to `out` [n, n_out], bfloat16 or float32; `bias`: [n_out] float32."""
        n, n_in = x.shape
        n_out = out.shape[1]
        self._library.rz_linear(
            x.data_ptr(),
            x.stride(0),
            n,
            n_in,
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            n_out,
            out.data_ptr(),
            out.stride(0),
            out.dtype is torch.float32,
            spare.data_ptr(),
        )

    def low_rank_(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """y[i] += b[s]^T (a[s] x[i]) for s = slots[i], unless it is -1.

        `x` [n, n_in], `y` [n, n_out], `a` [slots, max_rank, n_in], `b` [slots, max_rank, n_out]; the factors of slot s
        have ranks[s] rows. `ranks` and `slots` [n] are int64.
        """
        self._library.rz_low_rank(
            *(x.data_ptr(), x.stride(0), x.shape[0], x.shape[1], a.data_ptr(), b.data_ptr(), a.shape[1], y.shape[1]),
            *(ranks.data_ptr(), slots.data_ptr(), y.data_ptr(), y.stride(0)),
        )

    def pack_codes(
        self, blocks: Iterable[torch.Tensor], n_out: int, k: int, bits: Bits, input_bits: InputBits
    ) -> torch.Tensor:
        """Pack codes [n_out, k] uint8 of `bits` bits given as blocks of rows, for inputs of `input_bits` bits.

        Each block but the last has a multiple of SCALE_ROWS rows; k is a multiple of 16.
        """
        row = k * bits // 8
        packed = torch.empty(-(-n_out // SCALE_ROWS) * SCALE_ROWS * row, dtype=torch.uint8)
        first = 0
        for block in blocks:
            self._library.rz_pack_codes(
                block.data_ptr(), len(block), k, bits, input_bits, packed[first * row :].data_ptr()
            )
            first += len(block)
        return packed

    def inputs(self, x: torch.Tensor, weight: PackedCodes) -> torch.Tensor:
        """Return `x` [n, n_in] as rows of integers for products with `weight`: [n, bytes]."""
        rows = torch.empty(len(x), weight.input_bytes, dtype=torch.uint8)
        order = None if weight.order is None else weight.order.data_ptr()
        self._library.rz_quantize_rows(
            *(x.data_ptr(), x.stride(0), x.shape[0], weight.n_in, order, weight.k, weight.block),
            *(weight.input_bits, rows.data_ptr(), weight.input_bytes),
        )
        return rows

    def quantized_linear(
        self, inputs: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Write x W^T + bias of the `inputs` of n rows x to `out` [n, n_out], bfloat16 or float32; bias: float32."""
        self._library.rz_quantized_linear(
            *(inputs.data_ptr(), weight.input_bytes, inputs.shape[0], weight.k, weight.block),
            *(*weight.arguments, None if bias is None else bias.data_ptr(), weight.n_out),
            *(out.data_ptr(), out.stride(0), out.dtype is torch.float32),
        )

    def look_up(self, weight: PackedCodes, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the rows `rows` [n] int64, each rounded once: [n, n_in]."""
        out = torch.empty(len(rows), weight.n_in, dtype=torch.bfloat16)
        order = None if weight.order is None else weight.order.data_ptr()
        self._library.rz_look_up(
            *(*weight.arguments, weight.k, weight.block, order, weight.n_in),
            *(rows.data_ptr(), out.data_ptr(), len(rows)),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Normalise the last dimension of x [n, size] or [n, groups, size]; `weight` [groups, size] float32."""
        groups, size = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        self._library.rz_rms_norm(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), groups, eps),
            *(out.data_ptr(), out.stride(0), x.shape[0], size),
        )

    def add_(self, x: torch.Tensor, added: torch.Tensor, scale: float) -> None:
        """x += scale * added, both [n, size] and contiguous."""
        self._library.rz_add(x.data_ptr(), added.data_ptr(), scale, *x.shape)

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate `heads` [n, n_heads, head_dim] to `positions` [n]; cos and sin [max_positions, half] float32."""
        n, n_heads, head_dim = heads.shape
        self._library.rz_rotate(
            *(heads.data_ptr(), heads.stride(0), n_heads, head_dim),
            *(cos.data_ptr(), sin.data_ptr(), cos.shape[1], positions.data_ptr(), n),
        )

    def write_rows(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """cache[slots] = rows; cache [n_slots, width], rows [n, width]."""
        n, width = rows.shape
        self._library.rz_write_rows(
            *(cache.data_ptr(), slots.data_ptr(), rows.data_ptr(), rows.stride(0), width, n),
        )

    def write_codes(
        self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, heads: int, head_dim: int, block_tokens: int
    ) -> None:
        """Write `rows` [n, heads * head_dim], K then V, as int8 to the positions `slots` [n] of a layer's cache."""
        self._library.rz_write_int8(
            *(cache.data_ptr(), slots.data_ptr(), rows.data_ptr(), rows.stride(0)),
            *(heads, head_dim, block_tokens, rows.shape[0]),
        )

    def summarise(
        self, cache: torch.Tensor, summaries: torch.Tensor, slots: torch.Tensor, n_kv_heads: int, block_tokens: int
    ) -> None:
        """Write the summaries [n_blocks, n_kv_heads, 2, head_dim] of blocks whose last position is in `slots` [n]."""
        self._library.rz_summarize(
            *(cache.data_ptr(), summaries.data_ptr(), slots.data_ptr(), slots.shape[0]),
            *(n_kv_heads, summaries.shape[3], block_tokens, cache.dtype is torch.int8),
        )

    def choose_pages(
        self, q: torch.Tensor, summaries: torch.Tensor, sequences: Sequences, pages: torch.Tensor, block_tokens: int
    ) -> Sequences:
        """Return the sequences with the blocks that each KV head chooses: `pages` [n] int64; 0: all of them."""
        starts, lengths, blocks = sequences
        (n, width), (_, n_kv, _, head_dim) = blocks.shape, summaries.shape
        n_heads = q.shape[1] // head_dim
        chosen = torch.empty((n, n_kv, width), dtype=torch.int64)
        chosen_lengths = torch.empty((n,), dtype=torch.int64)
        scores = torch.empty((n, n_heads, -(-width // 16) * 16), dtype=torch.float32)
        self._library.rz_choose_pages(
            *(q.data_ptr(), q.stride(0), summaries.data_ptr(), n_kv, n_heads // n_kv, head_dim, block_tokens),
            *(starts.data_ptr(), lengths.data_ptr(), pages.data_ptr(), blocks.data_ptr(), width),
            *(scores.data_ptr(), chosen.data_ptr(), chosen_lengths.data_ptr(), n),
        )
        return starts, chosen_lengths, chosen

    def gate(self, gate_up: torch.Tensor, out: torch.Tensor, *, tanh: bool) -> None:
        """Write silu(gate) * up, or gelu_tanh(gate) * up, of [n, 2 * size] to `out` [n, size]."""
        n, size = out.shape
        self._library.rz_gate(gate_up.data_ptr(), out.data_ptr(), n, size, tanh)

    def draw(
        self,
        logits: torch.Tensor,
        first_id: int,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the key [n] int64 (backends/keys.py) of the token that each row of `logits` draws.

        `logits` [n, a multiple of 16] float32; column 0 is token `first_id`. The other tensors are [n], contiguous:
        float32, int64 and int64.
        """
        n, n_columns = logits.shape
        keys = torch.empty(n, dtype=torch.int64)
        arrays = (values.data_ptr() for values in (temperature, seeds, positions))
        self._library.rz_draw(logits.data_ptr(), logits.stride(0), n, n_columns, first_id, *arrays, keys.data_ptr())
        return keys

    def pick(self, logits: torch.Tensor, first_id: int, width: int) -> torch.Tensor:
        """Return the keys [n, width] int64 (backends/keys.py) of each row's best columns, the least key first.

        `logits` [n, a multiple of 16] float32; column 0 is token `first_id`.
        """
        n, n_columns = logits.shape
        keys = torch.empty(n, width, dtype=torch.int64)
        self._library.rz_pick(logits.data_ptr(), logits.stride(0), n, n_columns, first_id, width, keys.data_ptr())
        return keys

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log(sum(exp(logits))) [n] float32 of `logits` [n, a multiple of 16] float32."""
        n, n_columns = logits.shape
        mass = torch.empty(n)
        self._library.rz_weigh(logits.data_ptr(), logits.stride(0), n, n_columns, mass.data_ptr())
        return mass

    def all_reduce(self, group: Collectives, x: torch.Tensor) -> bool:
        """Sum contiguous `x` over the ranks, in place.

        Returns False, and leaves `x` and `group` unchanged, when after `looks` checks another rank has not arrived or
        has another size; the caller then calls again or fails.
        """
        return not self._library.rz_all_reduce(ctypes.addressof(group), x.data_ptr(), x.numel())

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, shape: AttentionShape, sequences: Sequences
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache; in int8 if `cache` is."""
        attend = self._library.rz_attend_int8 if cache.dtype is torch.int8 else self._library.rz_attend
        call_attention(attend, q, out, cache, shape, sequences)


def why_not(dtype: torch.dtype) -> str:
    """Why the kernels do not apply on this CPU; "" when they do, unless the operating system refuses registers."""
    if dtype is not torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}"
    return "" if has_amx() or has_vectors() else "this CPU has neither AMX tiles nor AVX2 nor NEON"


def open_kernels() -> Bfloat16Kernels:
    """Open the best kernels for this CPU.

    Raises RegistersRefusedError, and RuntimeError when the library is missing or its threads cannot be started.
    """
    return load_library(AMX if has_amx() else vector_library(pairs=True), torch.get_num_threads())


def vector_library(*, pairs: bool) -> Path:
    """The best library without AMX for this CPU; `pairs` allows libraries that multiply pairs of bfloat16."""
    if has_neon():
        return NEON_BF16 if pairs and has_neon_bf16() else NEON
    return AVX512_BF16 if pairs and has_avx512_bf16() else AVX512 if has_avx512() else AVX2


def load_library(path: Path, threads: int) -> Bfloat16Kernels:
    """Load the kernels to run on `threads` threads. Raises like `open_kernels`."""
    name = next(name for name in _MADE_FOR if path.name.startswith(name))
    return Bfloat16Kernels(open_library(path, threads), name)
