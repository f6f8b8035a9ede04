"""Every form of a weight: its numbers, parts of them, and their ends."""

from __future__ import annotations

import math

import pytest
import torch

from services.compute.backends.weights import Dense, Grouped, PerChannel, Stacked, Weight

N_OUT, N_IN = 37, 24
GROUPS = torch.randint(0, 3, (N_IN,), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _codes(low: int, high: int, n_columns: int = N_IN) -> torch.Tensor:
    return torch.randint(low, high, (N_OUT, n_columns), generator=torch.Generator().manual_seed(3))


DENSE = _random(N_OUT, N_IN)
UINT4, ZERO, SCALE = _codes(0, 16).byte(), _codes(0, 16, 3).byte(), _random(N_OUT, 3).abs().half()
OFFSET = (_random(N_OUT, 3) * 3).half()
INT8, E4M3, PER_OUTPUT = _codes(-128, 128).char(), DENSE.to(torch.float8_e4m3fn), _random(N_OUT, 1)
# Each with the numbers that it stands for.
WEIGHTS: dict[str, tuple[Weight, torch.Tensor]] = {
    "dense": (Dense(DENSE), DENSE),
    "grouped uint4": (
        Grouped(UINT4, SCALE, ZERO, GROUPS),
        (UINT4.float() - ZERO[:, GROUPS].float()) * SCALE[:, GROUPS].float(),
    ),
    "grouped int8 with offsets": (
        Grouped(INT8, SCALE, None, GROUPS, OFFSET),
        INT8.float() * SCALE[:, GROUPS].float() + OFFSET[:, GROUPS].float(),
    ),
    "grouped e4m3": (Grouped(E4M3, SCALE, None, GROUPS), E4M3.float() * SCALE[:, GROUPS].float()),
    "int8 of outputs": (PerChannel(INT8, PER_OUTPUT), INT8.float() * PER_OUTPUT),
    "e4m3 of outputs": (PerChannel(E4M3, PER_OUTPUT), E4M3.float() * PER_OUTPUT),
}


@pytest.mark.parametrize("form", WEIGHTS)
def test_weights_and_their_slices_equal_their_numbers(form: str) -> None:
    weight, numbers = WEIGHTS[form]
    assert weight.shape == (N_OUT, N_IN)
    assert torch.equal(weight.rows(3, 30), numbers[3:30])
    chosen = torch.tensor([5, 0, 36])
    assert torch.equal(weight.take(chosen).rows(0, 3), numbers[chosen])
    low, high = weight.ends()
    assert low <= numbers.min() <= numbers.max() <= high
    assert max(-low, high) <= 300 * numbers.abs().max()


def test_stacked_weights_of_several_forms_equal_their_numbers() -> None:
    stacked = Stacked(tuple(weight for weight, _ in WEIGHTS.values()))
    numbers = torch.cat([numbers for _, numbers in WEIGHTS.values()])
    assert stacked.shape == numbers.shape
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(stacked.dense(dtype, CPU), numbers.to(dtype))
        blocks = list(stacked.dense_blocks(16, dtype))
        assert [len(block) for block in blocks[:-1]] == [16] * (len(blocks) - 1)
        assert torch.equal(torch.cat(blocks), numbers.to(dtype))


def test_nan_has_no_range() -> None:
    spoiled = E4M3.clone().view(torch.uint8)
    spoiled[2, 2] = 0xFF
    nan, inf = torch.full_like(SCALE, math.nan), torch.full_like(PER_OUTPUT, math.inf)
    for weight in (
        Dense(DENSE * math.nan),
        Grouped(UINT4, nan, ZERO, GROUPS),
        PerChannel(INT8, inf),
        PerChannel(spoiled.view(torch.float8_e4m3fn), PER_OUTPUT),
    ):
        assert not all(math.isfinite(end) for end in weight.ends())
    nothing = torch.empty(0, N_IN)
    assert Dense(nothing).ends() == PerChannel(nothing.char(), torch.empty(0, 1)).ends() == (0.0, 0.0)
