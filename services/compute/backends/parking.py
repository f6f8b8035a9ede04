"""Moves tensors of a device to the host's memory and back, under the objects that refer to them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Restore = Callable[[], None]


def tensors_on(device: torch.device) -> list[Tensor]:
    """Return all tensors on a device that Python refers to."""
    gc.unfreeze()  # frozen objects are not listed
    tensors = (item for item in gc.get_objects() if issubclass(type(item), Tensor))
    return [tensor for tensor in tensors if tensor.device == device]


def park(tensors: Iterable[Tensor]) -> Restore:
    """Free the memory of `tensors`, views of it included, after a copy to the host's memory, pinned for GPUs.

    No tensor may be used until the returned function has brought the numbers back, to other addresses.
    """
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    parked = [(storage, _copy_of(storage)) for storage in storages.values() if storage.nbytes()]
    for storage, _ in parked:
        storage.resize_(0)

    def restore() -> None:
        for storage, copy in parked:
            storage.resize_(len(copy))
            _as_bytes(storage).copy_(copy, non_blocking=True)
        if parked and parked[0][0].device.type == "cuda":
            torch.cuda.synchronize(parked[0][0].device)

    return restore


def _copy_of(storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_as_bytes(storage))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
