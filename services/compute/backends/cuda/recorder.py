"""Records computations as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Recording:
    """A computation that is launched as a whole, with the tensors it was recorded with."""

    replay: Callable[[], None]
    output: Tensor  # output of every replay


class Recorder(Protocol):
    """A device that can repeat what it computes."""

    def probe(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute once without recording. Raises RuntimeError if the host has to wait for the device."""

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record what was probed, without computing it."""


class CudaRecorder:
    """CUDA graphs of one device, whose memory is shared, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def probe(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute once, to load the kernels and to detect whether the host has to wait for the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream), _no_word_from_the_host():
                return compute()
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Capture a graph."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _garbage_kept(), capturing:
            output = compute()
        return Recording(graph.replay, output)


@contextmanager
def _no_word_from_the_host() -> Iterator[None]:
    """Make operations that wait for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Disable the garbage collector: destroying another model's graph would end a capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
