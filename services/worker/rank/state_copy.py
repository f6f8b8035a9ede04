"""Copies states between this rank's rows and the staging area it shares with the server."""

from __future__ import annotations

import time

import torch

from services.compute.backends.states import StateStore
from services.worker.protocol.order_codec import StateOrder

_TRIES = 3  # the first one also brings the memory of its row


class StateCopier:
    """Copies bytes of a row over all layers, in order; a model without states has rows without bytes."""

    def __init__(self, states: StateStore | None, staging: memoryview) -> None:
        self._states = states
        layers = states.layers if states is not None else ()
        # [n_rows, bytes] each
        self._parts = [part.view(part.shape[0], -1).view(torch.uint8) for parts in layers for part in parts]
        self._staging = torch.frombuffer(staging, dtype=torch.uint8)

    @property
    def row_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return sum(part.shape[1] for part in self._parts)

    @torch.inference_mode()
    def copy(self, order: StateOrder) -> None:
        """Execute an order for bytes that fit the staging area, which the server has checked."""
        at, end = 0, order.start + order.size
        for part in self._parts:
            first, last = max(order.start, at), min(end, at + part.shape[1])
            if first < last:
                inner = part[order.row, first - at : last - at]
                staged = self._staging[first - order.start : last - order.start]
                target, source = (staged, inner) if order.out else (inner, staged)
                target.copy_(source)
            at += part.shape[1]

    @torch.inference_mode()
    def measure(self, n_slots: int) -> float:
        """Return the seconds that a snapshot of a state takes: the fastest of some, before there are requests.

        0 without rows after those of the slots.
        """
        if self._states is None or not self._parts or len(self._parts[0]) <= n_slots:
            return 0.0
        return min(self._copy_s(self._states, n_slots) for _ in range(_TRIES))

    def _copy_s(self, states: StateStore, row: int) -> float:
        device = self._parts[0].device
        began = time.perf_counter()
        states.copy(0, row)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began
