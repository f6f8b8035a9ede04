"""Memory of the host is registered with CUDA's driver, here a stand-in; a refusal is said and ends nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from services.compute.backends.base import DeviceMemory
from services.compute.backends.cuda.memory import CudaMemory


@dataclass
class Driver:
    """A part of the CUDA runtime."""

    answer: int
    registered: list[tuple[int, int]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802 - its name
        self.registered.append((address, n_bytes))
        return self.answer


@pytest.mark.parametrize("answer", [0, 801])
def test_whole_area_is_registered_and_a_refusal_is_said(
    answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = CudaMemory(torch.device("cpu"))
    assert isinstance(memory, DeviceMemory)
    area = memoryview(bytearray(8192))[4096:]
    memory.pin(area)
    assert driver.registered == [(torch.frombuffer(area, dtype=torch.uint8).data_ptr(), 4096)]
    assert ("error 801" in caplog.text) == bool(answer)
