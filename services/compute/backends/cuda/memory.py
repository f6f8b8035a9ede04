"""The memory of a GPU: the only file that asks torch.cuda for it."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from services.compute.backends.base import MemoryReport
from services.compute.backends.mapped import give_back_code
from services.compute.backends.parking import Restore, park, tensors_on

logger = logging.getLogger(__name__)


class CudaMemory:
    """Memory allocated by torch, and free memory of the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        """Bytes that this process has allocated."""
        return torch.cuda.memory_allocated(self._device)

    def release(self) -> None:
        """Give freed memory back, which torch keeps otherwise."""
        torch.cuda.empty_cache()

    def rest(self) -> None:
        """Give back freed memory and the program's code; memory that the device may read stays."""
        self.release()
        give_back_code()

    def available(self, ranks: int) -> int:
        """Bytes that this rank may still allocate; every rank has its own device."""
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def park(self) -> Restore:
        """Move all tensors to pinned memory of the host; the returned function brings them back."""
        torch.cuda.synchronize(self._device)
        return park(tensors_on(self._device))

    def pin(self, area: memoryview) -> None:
        """Register memory of the host with the driver. What it refuses stays as it is, and copies of it are slower."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
        if refusal := int(runtime.cudaHostRegister(address, area.nbytes, 0)):
            logger.warning("CUDA does not pin memory for copies of KV blocks, which are slower so: error %d", refusal)
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # the first launch after an error reports that error

    def report(self) -> MemoryReport:
        """Return today's numbers; `peak` counts from the last report on."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return MemoryReport(total, free, torch.cuda.memory_reserved(self._device), peak)
