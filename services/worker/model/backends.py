"""Chooses the attention backend of this machine: the first that agrees with the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.worker.kernels.attention import open_attention
from services.worker.kernels.bfloat16 import MAX_HEAD_DIM, Bfloat16Kernels
from services.worker.model.attention import AttentionBackend, AttentionShape
from services.worker.model.attention_kernels import PagedAmx, PagedAvx
from services.worker.model.attention_sdpa import PagedSdpa
from services.worker.model.attention_varlen import PagedVarlen
from services.worker.model.reference import check_backend

logger = logging.getLogger(__name__)

Candidate = Callable[[], AttentionBackend[Any]]


def candidates(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, kernels: Bfloat16Kernels | None = None
) -> list[Candidate]:
    """Return the backends that may serve, fastest first."""
    gathering = [lambda: PagedSdpa(shape, dtype, device)]
    if kernels is not None and shape.head_dim % kernels.head_multiple == 0 and shape.head_dim <= MAX_HEAD_DIM:
        paged = PagedAmx if kernels.amx else PagedAvx
        return [lambda: paged(shape, kernels), *gathering]
    if (attention := open_attention(dtype, device, shape.head_dim)) is not None:
        return [lambda: PagedAvx(shape, attention), *gathering]
    if device.type != "cuda" or shape.softcap is not None or dtype is torch.float32:
        return [*gathering]
    return [lambda: PagedVarlen(shape), *gathering]


def choose_backend(
    choices: Sequence[Candidate], shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> AttentionBackend[Any]:
    """Return the first backend that passes its check, warning of those that do not. Raises RuntimeError."""
    for make in choices:
        backend = make()
        try:
            problem = check_backend(backend, shape, dtype, device)
        except (RuntimeError, ValueError, NotImplementedError) as error:  # kernels refuse shapes and devices
            problem = str(error)
        if problem is None:
            logger.info("attention: %s", type(backend).__name__)
            return backend
        logger.warning("attention backend %s is not used: %s", type(backend).__name__, problem)
    raise RuntimeError(f"no attention backend computes {shape} in {dtype} on {device}")
