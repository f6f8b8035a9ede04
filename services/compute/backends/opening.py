"""Opens the backend of a device."""

from __future__ import annotations

import logging

import torch

from services.compute.backends.base import Backend
from services.compute.backends.cpu.backend import open_cpu
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.kv_format import KvFormat

logger = logging.getLogger(__name__)


def open_backend(
    dtype: torch.dtype,
    device: torch.device,
    kv_format: KvFormat | None = None,
    *,
    triton: bool = True,
    graphs: bool = True,
) -> Backend:
    """Return the backend for `dtype` on `device`, a CPU or a GPU. Raises RuntimeError when it cannot be opened.

    `kv_format` is the format of the KV cache; None for numbers of `dtype`. `triton`: on GPUs use our kernels,
    too; `graphs`: replay decodes there.
    """
    settle_vector_math()
    if device.type == "cpu":
        return open_cpu(dtype, kv_format)
    logger.info("kernels: torch's%s, because the device is %s", " and ours in Triton" if triton else "", device.type)
    return CudaBackend(dtype, device, kv_format, triton=triton, graphs=graphs)


def settle_vector_math() -> None:
    """Have MKL choose its vector functions (cos, sin, exp, log of tensors) on one thread.

    It chooses in the first call of a process. When two threads of torch make that call at once, one of them may compute
    its half with an error of 1e-4 instead of 1e-7: a rotary table, and so a text, of that process alone would differ.
    """
    torch.zeros(1).cos()
