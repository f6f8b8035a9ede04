"""Tensors of zeros, and when they take memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from services.compute.backends import zeros as module
from services.compute.backends.zeros import Intake, take_memory, zeros

CPU = torch.device("cpu")
MIB = 1 << 20


def own_bytes() -> int:
    """Memory that only this process has."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", [7, 3 * MIB + 5])
def test_all_numbers_are_zero_and_can_be_written(dtype: torch.dtype, n: int) -> None:
    tensor = zeros((3, n), dtype, CPU)
    take_memory([tensor])
    assert (tensor.shape, tensor.dtype) == ((3, n), dtype)
    assert not tensor.view(torch.int8).any()
    tensor[1] = 1
    assert bool((tensor[1].float() == 1).all())
    assert not tensor[::2].view(torch.int8).any()


def test_memory_is_taken_on_request_and_given_back_with_the_tensor() -> None:
    before = own_bytes()
    tensors = [zeros((32, MIB), torch.int8, CPU) for _ in range(8)]
    assert own_bytes() - before < 64 * MIB
    take_memory(tensors)
    assert own_bytes() - before > 240 * MIB
    tensors.clear()
    assert own_bytes() - before < 64 * MIB


def test_pages_are_taken_one_after_another_and_no_number_changes() -> None:
    before = own_bytes()
    tensors = [zeros((32, MIB), torch.int8, CPU) for _ in range(4)]
    intake = Intake(tensors)
    tensors[0][0, :100], tensors[3][31] = 7, 5
    assert own_bytes() - before < 32 * MIB
    while (left := intake.left) > 64 * MIB:
        intake.take()
        assert intake.left < left
    assert 48 * MIB < own_bytes() - before < 96 * MIB
    while intake.left:
        intake.take()
    assert own_bytes() - before > 120 * MIB
    assert [int(tensor.sum(dtype=torch.int64)) for tensor in tensors] == [700, 0, 0, 5 * MIB]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Spans of memory that were to be taken; each takes two seconds."""
    spans = list[range]()
    monkeypatch.setattr(module, "advise", lambda span, advice: spans.append(span))
    return spans


def test_first_pages_of_all_tensors_come_first_and_pauses_are_three_times_as_long(advised: list[range]) -> None:
    tensors = [zeros((n, MIB), torch.int8, CPU) for n in (4, 7, 1)]  # the last one is too small for a mapping
    intake = Intake(tensors, clock=lambda: 100.0, spent=lambda: 2.0 * len(advised))
    assert intake.rest_s == 6
    while intake.left:
        intake.take()
    places = [
        next(i for i, one in enumerate(tensors) if one.data_ptr() <= span.start < one.data_ptr() + one.nbytes)
        for span in advised
    ]
    n = places.count(0)
    assert places == [0, 1] * n + [1] * (len(places) - 2 * n)
    for tensor, mine in zip(
        tensors[:2], (advised[: 2 * n : 2], advised[1 : 2 * n : 2] + advised[2 * n :]), strict=True
    ):
        assert [span.start for span in mine] == [tensor.data_ptr(), *(span.stop for span in mine[:-1])]
        assert mine[-1].stop == tensor.data_ptr() + tensor.nbytes
        assert all(span.start % (2 * MIB) == 0 for span in mine[1:]), "a page is a huge page"


def test_system_that_cannot_take_memory_unwritten_takes_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def advise(span: range, advice: int) -> None:
            raise OSError(code, "madvise")

        monkeypatch.setattr(module, "advise", advise)

    before, tensors = own_bytes(), [zeros((32, MIB), torch.int8, CPU)]
    refuse(errno.ENOMEM)
    with pytest.raises(OSError, match="madvise"):
        Intake(tensors)
    assert own_bytes() - before < 16 * MIB
    refuse(errno.EINVAL)
    assert Intake(tensors).left == 0
    assert own_bytes() - before > 30 * MIB
