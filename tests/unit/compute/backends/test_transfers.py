"""One upload holds arrays of several dtypes, each where Triton expects a tensor to begin; on CPUs nothing moves."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.backends.cuda.transfers import BufferLayout
from services.compute.backends.transfers import DirectTransfers


def test_arrays_are_unpacked_from_their_packed_offsets() -> None:
    arrays = [
        np.arange(3),
        np.linspace(0, 1, 5, dtype=np.float32),
        np.arange(12).reshape(4, 3)[::2],  # not contiguous
        np.zeros(0, np.int64),
        np.array([0.1]),
    ]
    packing = BufferLayout.of(arrays)
    buffer = np.full(packing.size + 16, 0xFF, np.uint8)
    packing.pack(arrays, buffer)
    views = packing.views(torch.from_numpy(buffer[: packing.size]))
    for view, array in zip(views, arrays, strict=True):
        assert view.shape == array.shape
        assert np.array_equal(view.numpy(), array)
        assert not view.storage_offset() * view.element_size() % 16
    assert (buffer[packing.size :] == 0xFF).all(), "nothing behind the buffer is written"


def test_on_a_cpu_numbers_are_there_at_once() -> None:
    transfers = DirectTransfers(torch.device("cpu"))
    (tensor,) = transfers.up([np.arange(4)])
    down = transfers.down(tensor)
    assert down.arrived()
    assert down.values().tolist() == [0, 1, 2, 3]
