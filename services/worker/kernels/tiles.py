"""Our bfloat16 kernels for CPUs with tile registers (AMX), and whether this machine has them.

A row's bits depend on that row alone, whatever the number of rows. All tensors are bfloat16 on CPU with contiguous
last dimensions unless said otherwise; their shapes are the caller's promise.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from services.worker.cpu import has_tiles

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("librz_tiles.so")
TILE_K = 32  # linear layers and heads are multiples of it
MAX_HEAD_DIM = 256
_STRIP = 64  # outputs of a packed weight are padded to a multiple of it
_TILE_ROWS = 16
_NO_THREADS = -2  # from rz_enable
_REFUSED = "the operating system refuses the tile registers"

_pointer, _long, _float, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rz_pack_weight": (_pointer, _long, _long, _pointer),
    "rz_linear": (_pointer, *[_long] * 3, _pointer, _pointer, _long, _pointer, _long, _int, _pointer),
    "rz_rms_norm": (_pointer, _long, _pointer, _long, _float, _pointer, _long, _long, _long),
    "rz_add": (_pointer, _pointer, _float, _long),
    "rz_rotate": (_pointer, *[_long] * 3, _pointer, _pointer, _long, _pointer, _long),
    "rz_write_rows": (_pointer, _pointer, _pointer, *[_long] * 3),
    "rz_gate": (_pointer, _pointer, _long, _long, _int),
    "rz_sum": (_pointer, _pointer, _long),
    "rz_attend": (
        *(_pointer, _long, _pointer, _long, _pointer),
        *(_long, _long, _long, _long, _float, _float, _long),
        *(_pointer, _pointer, _pointer, _long, _long),
    ),
}


class SharedGroup(ctypes.Structure):
    """Where the ranks of a group put what they bring to a collective. `area`: an address."""

    _fields_ = (
        *(("area", _pointer), ("stride", _long), ("sizes", _long), ("payload", _long)),
        *(("rank", _long), ("ranks", _long)),
    )


class TileKernels:
    """The compiled kernels, called with tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.rz_publish.argtypes = (_pointer, _pointer, _long, ctypes.c_uint64, _long)
        library.rz_publish.restype = _int
        self._library = library

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return [n_out, n_in] in the layout that `linear` reads, n_out padded; n_in: a multiple of 32."""
        n_out, n_in = weight.shape
        packed = torch.empty(-(-n_out // _STRIP) * _STRIP * n_in, dtype=torch.bfloat16)
        self._library.rz_pack_weight(weight.data_ptr(), n_out, n_in, packed.data_ptr())
        return packed

    def spare(self, n_in: int) -> torch.Tensor:
        """Return the room that `linear` needs for an incomplete tile of rows."""
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
            n_out,
            out.dtype is torch.float32,
            spare.data_ptr(),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Normalise the last dimension of x [n, size], or [n, groups, size] with `weight` [groups, size] float32."""
        groups, size = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        self._library.rz_rms_norm(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), groups, eps),
            *(out.data_ptr(), out.stride(0), x.shape[0], size),
        )

    def add_(self, x: torch.Tensor, added: torch.Tensor, scale: float) -> None:
        """x += scale * added, both contiguous and of one shape."""
        self._library.rz_add(x.data_ptr(), added.data_ptr(), scale, x.numel())

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

    def gate(self, gate_up: torch.Tensor, out: torch.Tensor, *, tanh: bool) -> None:
        """Write silu(gate) * up, or gelu_tanh(gate) * up, of [n, 2 * size] to `out` [n, size]."""
        n, size = out.shape
        self._library.rz_gate(gate_up.data_ptr(), out.data_ptr(), n, size, tanh)

    def publish(self, group: SharedGroup, x: torch.Tensor, tag: int, looks: int) -> bool:
        """Show `x` to the other ranks under `tag`; whether all of them have come that far after `looks` looks."""
        return bool(self._library.rz_publish(ctypes.addressof(group), x.data_ptr(), x.numel(), tag, looks) == 0)

    def sum(self, group: SharedGroup, out: torch.Tensor) -> None:
        """Write the sum of what all ranks brought to `out`, contiguous."""
        self._library.rz_sum(ctypes.addressof(group), out.data_ptr(), out.numel())

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        shape: tuple[int, int, int, int, float, float, int],
        sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache.

        `shape`: n_kv_heads, group, head_dim, block_size, scale, softcap (0: none), window (0: none).
        `sequences`: row starts [n + 1], context lengths [n], block tables [n, n_blocks], all int64.
        """
        starts, lengths, blocks = sequences
        self._library.rz_attend(
            *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), cache.data_ptr()),
            *shape,
            *(starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[1], blocks.shape[0]),
        )


def open_kernels(dtype: torch.dtype, device: torch.device) -> TileKernels | None:
    """Return the kernels, or None where they do not apply; `explain` says why.

    Raises RuntimeError when this machine should have them and they are missing, or when there are no threads.
    """
    if _why_not(dtype, device) is not None:
        return None
    if not LIBRARY.exists():
        raise RuntimeError(f"{LIBRARY} is missing: run `make kernels`, or install again")
    kernels = load_library(LIBRARY, torch.get_num_threads())
    if kernels is None:
        logger.warning("%s: torch's kernels serve, at a fraction of the speed", _REFUSED)
    return kernels


def load_library(path: Path, threads: int) -> TileKernels | None:
    """Load the kernels to run on `threads` threads; None: the operating system refuses the tile registers.

    Raises RuntimeError when there are no threads.
    """
    library = ctypes.CDLL(str(path))
    library.rz_enable.argtypes, library.rz_enable.restype = (_long,), _int
    result = library.rz_enable(threads)
    if result == _NO_THREADS:
        raise RuntimeError(f"the kernels cannot start {threads} threads")
    return None if result else TileKernels(library)


def explain(kernels: TileKernels | None, dtype: torch.dtype, device: torch.device) -> str:
    """Say whose kernels serve, and why, of what `open_kernels` returned."""
    if kernels is not None:
        return "ours for AMX tiles"
    return f"torch's, because {_why_not(dtype, device) or _REFUSED}"


def _why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why our kernels do not apply, as far as can be told without asking the operating system."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if dtype is not torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}"
    return None if has_tiles() else "this CPU has no AMX tiles for bfloat16"
