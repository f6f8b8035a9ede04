"""Keys and values in int8 with a bfloat16 scale for each token and head: 8.25 bits per number with heads of 64."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.backends.kv_format import RowWriter
from services.worker.backends.scaled_codes import ScaledCodes
from services.worker.backends.shapes import KvShape


class Int8(ScaledCodes):
    """Codes in int8, which devices may write by a kernel of theirs."""

    __slots__ = ()

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor, writer: RowWriter) -> None:
        """Write `rows` [n, width] to the positions `slots` [n]."""
        writer.scatter_codes(layer, shape, slots, rows)


FORMAT = Int8("int8", torch.int8, 127.0)
