"""Tensors that leave their device and come back under the objects that hold them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from services.compute.backends.cpu.parked import park_in_file
from services.compute.backends.parking import park, tensors_on

HALF = 1 << 17  # numbers
ENOUGH = 1 << 30  # bytes of free memory


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


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """Two tensors of 1 MiB, and a view of the first."""
    whole = torch.arange(2 * HALF, dtype=torch.float32)
    return whole, whole[HALF:], torch.rand(4 * HALF).bfloat16().view(4, HALF).T


def test_weights_wait_in_a_file_without_a_name_and_return_with_their_views(tmp_path: Path) -> None:
    whole, half, other = large = weights()
    small, shared = torch.arange(10), torch.ones(4 * HALF, dtype=torch.uint8)
    array = shared.numpy()
    expected = [tensor.clone() for tensor in large]
    restore = park_in_file([*large, small, shared, torch.empty(0)], str(tmp_path), ENOUGH)
    assert [tensor.untyped_storage().nbytes() for tensor in (*large, small, shared)] == [0, 0, 0, 80, 4 * HALF]
    assert not list(tmp_path.iterdir())
    restore()
    assert all(map(torch.equal, (whole, half, other), expected))
    assert half.data_ptr() == whole.data_ptr() + 4 * HALF
    assert array.sum() == 4 * HALF


@pytest.mark.parametrize(("memory", "disk"), [(1, 4), (2, 3)])
def test_weights_stay_that_are_larger_than_the_free_memory_or_half_of_the_free_disk(
    memory: int, disk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = weights()
    expected = [tensor.clone() for tensor in large]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk << 20))
    words = f"{memory} MiB of memory and {disk} MiB of disk are free, which is too little for 2 MiB of weights"
    with pytest.raises(OSError, match=words) as refused:
        park_in_file(large, str(tmp_path), memory << 20)
    assert refused.value.errno == errno.ENOSPC
    assert all(map(torch.equal, large, expected))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 << 20))
    park_in_file(large, str(tmp_path), 2 << 20)()
    assert all(map(torch.equal, large, expected))


def test_weights_stay_that_cannot_be_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, write = weights(), os.pwrite
    expected = [tensor.clone() for tensor in large]

    def full(file: int, content: bytes, at: int) -> int:
        if at >= 1 << 20:
            raise OSError(errno.ENOSPC, "the disk is full")
        return write(file, content, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="the disk is full"):
        park_in_file(large, str(tmp_path), ENOUGH)
    assert all(map(torch.equal, large, expected))


def test_threads_that_bring_weights_back_give_way_to_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, niceness = os.preadv, set[int]()

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def recorded(file: int, into: list[memoryview], at: int) -> int:
        niceness.add(own())
        return read(file, into, at)

    monkeypatch.setattr(os, "preadv", recorded)
    large, before = weights(), own()
    park_in_file(large, str(tmp_path), ENOUGH)()
    assert niceness == {min(before + 5, 19)}
    assert own() == before
