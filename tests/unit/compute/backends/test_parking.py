"""Tensors that leave their device and come back under the objects that hold them."""

from __future__ import annotations

import torch

from services.compute.backends.parking import park, tensors_on


def test_parked_tensors_give_their_memory_back_and_return_with_their_views() -> None:
    whole = torch.arange(1000, dtype=torch.float32)
    half, other, empty = whole[500:], torch.ones(3, 5, dtype=torch.bfloat16).T, torch.empty(0)
    expected = [tensor.clone() for tensor in (whole, half, other)]
    restore = park([whole, half, other, empty])
    assert [tensor.untyped_storage().nbytes() for tensor in (whole, half, other)] == [0, 0, 0]
    restore()
    assert all(map(torch.equal, (whole, half, other), expected))
    assert half.data_ptr() == whole.data_ptr() + 2000


def test_tensors_of_a_device_are_listed_by_their_device() -> None:
    here, elsewhere = torch.ones(3), torch.ones(3, device="meta")
    listed = {id(tensor) for tensor in tensors_on(torch.device("cpu"))}
    assert id(here) in listed
    assert id(elsewhere) not in listed
