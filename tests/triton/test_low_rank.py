"""The products of adapters on GPUs: against the factors in float64, alone and with rows of other adapters."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.batch import AdapterNumbers, AdapterRows
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.low_rank import TritonLowRank
from services.compute.backends.cuda.ops import CudaOps
from tests.triton.test_attention import DEVICE

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SLOTS, MAX_RANK = 3, 21
SIZE = st.sampled_from([8, 40, 130, 257])


@settings(max_examples=3)
@given(n=st.integers(1, 4), n_in=SIZE, n_out=SIZE, dtype=st.sampled_from([*LIMITS]), seed=st.integers(0, 9))
@example(n=9, n_in=300, n_out=200, dtype=torch.bfloat16, seed=1)
def test_each_row_gets_the_product_with_its_own_factors(
    n: int, n_in: int, n_out: int, dtype: torch.dtype, seed: int
) -> None:
    """Of another rank in each slot, one of which is empty again; into columns of a wider layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 4).to(DEVICE, dtype)

    layer, by_torch = (ops(dtype, DEVICE).low_rank(n_out, n_in, SLOTS, MAX_RANK) for ops in (TritonOps, CudaOps))
    assert isinstance(layer, TritonLowRank)
    factors = [(normal(rank, n_in), normal(n_out, rank)) for rank in (21, 16, 3)]
    for slot, (a, b) in enumerate(factors):
        for one in (layer, by_torch):
            one.put(slot, a.float(), b.float())
    for one in (layer, by_torch):
        one.clear(1)
    x, wide = normal(n, n_in), normal(n, n_out + 8)
    slots = torch.randint(-1, SLOTS, (n,), generator=generator).to(DEVICE)
    before, torchs = wide.clone(), wide.clone()
    layer.add_(wide[:, 3 : 3 + n_out], x, AdapterRows(slots, ()))
    if (rows := AdapterNumbers.of(slots.cpu().numpy())) is not None:
        by_torch.add_(torchs[:, 3 : 3 + n_out], x, rows.on_device(slots, torch.from_numpy(rows.order).to(DEVICE)))
    for row, slot in enumerate(slots.tolist()):
        start = before[row, 3 : 3 + n_out]
        if slot in (-1, 1):
            assert torch.equal(wide[row], before[row])
            assert torch.equal(torchs[row], before[row])
            continue
        a, b = (one.double() for one in factors[slot])
        exact = start.double() + b @ (a @ x[row].double())
        for actual in (wide, torchs):
            assert (actual[row, 3 : 3 + n_out] - exact).abs().max() <= LIMITS[dtype] * (1 + exact.abs().max())
        alone = start.clone().unsqueeze(0)
        layer.add_(alone, x[row : row + 1], AdapterRows(slots[row : row + 1], ()))
        assert torch.equal(alone[0], wide[row, 3 : 3 + n_out])
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, 3 + n_out :], before[:, 3 + n_out :])
