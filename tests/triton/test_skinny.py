"""Products of few rows on GPUs: those of torch, and each row's bits its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.kernels import skinny as kernels
from services.compute.backends.cuda.skinny import TILINGS, SkinnyLinear, Tiling, n_shares, reads
from services.compute.backends.torch.ops import TorchLinear
from services.compute.backends.weights import Dense, Stacked
from tests.triton.test_attention import DEVICE

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE, dtype)


@settings(max_examples=12)
@given(
    n=st.integers(1, 64),
    n_out=st.sampled_from([5, 40, 100]),
    n_in=st.sampled_from([64, 192, 1024, 3072]),
    biased=st.booleans(),
    tiling=st.sampled_from(TILINGS),
    dtype=st.sampled_from([*LIMITS]),
)
@example(n=17, n_out=100, n_in=4096, biased=True, tiling=TILINGS[0], dtype=torch.bfloat16)
def test_a_product_is_torchs(n: int, n_out: int, n_in: int, biased: bool, tiling: Tiling, dtype: torch.dtype) -> None:
    weight, x = numbers(n_out, n_in, dtype=dtype), numbers(n, n_in + 16, dtype=dtype)[:, :n_in]
    bias = numbers(n_out, dtype=dtype) if biased else None
    assert reads(weight)
    layer = SkinnyLinear(kernels, weight, bias, lambda shape, n_rows: tiling)
    exact = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    for found, limit in ((layer(x), LIMITS[dtype]), (layer.in_float32(x), 1e-5)):
        assert found.shape == exact.shape
        assert (found.float() - exact).abs().max() <= limit * exact.abs().max()


@pytest.mark.parametrize("n_in", [192, 4096])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(n_in: int, tiling: Tiling) -> None:
    weight, x = numbers(100, n_in, dtype=torch.bfloat16), numbers(16, n_in, dtype=torch.bfloat16)
    layer = SkinnyLinear(kernels, weight, None, lambda shape, n_rows: tiling)
    together = layer.in_float32(x)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 12)):
        assert torch.equal(layer.in_float32(x[rows]), together[rows])


def test_inputs_are_divided_by_the_weight_alone() -> None:
    sizes = {(100, 192): 1, (100, 1024): 2, (100, 4096): 8, (100, 1 << 16): 8, (2048, 4096): 1, (1024, 4096): 2}
    assert {size: n_shares(torch.Size(size)) for size in sizes} == sizes


def test_layers_and_heads_of_a_model_race_where_there_is_a_timer() -> None:
    weight, dtype = Stacked((Dense(torch.randn(256, 512) / 16),)), torch.bfloat16
    assert type(TritonOps(dtype, DEVICE).linear(weight, None)) is TorchLinear
    raced = []

    def ours_wins(run: Callable[[], None]) -> float:
        run()
        raced.append(run)
        return 1 / len(raced)

    ops = TritonOps(dtype, DEVICE, ours_wins)
    layer, (_, head) = ops.linear(weight, None), ops.tied(weight, None)
    assert isinstance(layer, SkinnyLinear)
    assert isinstance(head, SkinnyLinear)
    ops.race(SingleRank())
    x = numbers(3, 512, dtype=dtype)
    exact = x.float() @ weight.dense(dtype, DEVICE).float().T
    assert raced
    assert torch.equal(layer.in_float32(x), head.in_float32(x))
    assert (head.in_float32(x) - exact).abs().max() <= 1e-5 * exact.abs().max(), "unrounded, so ours"
