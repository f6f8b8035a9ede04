"""GPTQ and AWQ lose less of the outputs than rounding to nearest; grids hold what they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.tools.quantizer.choice import Candidate, choose
from services.tools.quantizer.grid import range_grid
from services.tools.quantizer.methods.base import Inputs, Repeats
from services.tools.quantizer.methods.registry import METHODS
from services.tools.quantizer.scheme import Scheme


def _inputs(n_in: int, seed: int) -> Inputs:
    """Inputs that depend on each other, a few of them large, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randn(2048, n_in // 2, generator=generator)
    x = sources @ torch.randn(n_in // 2, n_in, generator=generator) / n_in**0.5
    x += 0.1 * torch.randn(x.shape, generator=generator)
    x[:, :: n_in // 4] *= 20
    return Inputs(x.t() @ x, x.abs().mean(dim=0), len(x))


@pytest.mark.parametrize("symmetric", [True, False])
def test_calibration_pays(symmetric: bool) -> None:
    scheme = Scheme(4, 32, symmetric)
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    inputs = _inputs(128, 2)
    error = {}
    for name, method in METHODS.items():
        factors = method.scale(weight, inputs, scheme, torch.bfloat16, Repeats())
        made = method.quantize(weight * factors, inputs.scaled(factors), scheme, torch.bfloat16)
        error[name] = inputs.error(made.numbers() / factors - weight)
    assert error["gptq"] < 0.3 * error["rtn"]
    assert error["awq"] < 0.7 * error["rtn"]


def test_query_heads_that_share_values_get_one_factor() -> None:
    inputs, repeats = _inputs(64, 3), Repeats(times=2, size=16)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    factors = METHODS["awq"].scale(weight, inputs, Scheme(4, 32, False), torch.bfloat16, repeats).view(2, 2, 16)
    assert torch.equal(factors[:, 0], factors[:, 1])
    assert not torch.allclose(factors, torch.ones_like(factors))


def test_a_constant_zero_input_breaks_no_method() -> None:
    inputs = _inputs(64, 5)
    inputs.products[7] = inputs.products[:, 7] = inputs.magnitudes[7] = 0
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(6))
    for method in METHODS.values():
        assert method.quantize(weight, inputs, Scheme(4, 32, False), torch.bfloat16).numbers().isfinite().all()


@given(st.sampled_from([4, 8]), st.sampled_from([0, 32]), st.booleans(), st.integers(0, 2**16), st.floats(1e-3, 1e3))
def test_no_number_moves_further_than_half_a_step(
    bits: int, group: int, symmetric: bool, seed: int, size: float
) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * size
    weight[0] = weight[0].abs() + size  # one sign: 0 has to be a level all the same
    weight[1, :32] = 0
    grid = range_grid(weight, Scheme(bits, group, symmetric), torch.bfloat16)
    step = grid.scale.float().repeat_interleave(64 // grid.scale.shape[1], dim=1)
    # A rounded scale loses up to 2^-9 of the range at its ends, and a symmetric range one code.
    slack = step * (1.0 if symmetric else 0.5) + step * grid.scheme.levels * 2**-8
    assert ((grid.numbers(grid.round(weight)) - weight).abs() <= slack).all()


def test_bytes_go_where_the_error_falls_most_per_byte() -> None:
    candidates = {
        "large": Candidate(0.10, 0.0, 400, 800),
        "small": Candidate(0.05, 0.0, 50, 100),
        "costly": Candidate(0.06, 0.0, 500, 1000),
        "worse": Candidate(0.01, 0.02, 50, 60),
    }
    assert choose(candidates, 0.0) == set()
    assert choose(candidates, 0.05) == {"small"}
    assert choose(candidates, 0.45) == {"small", "large"}
    assert choose(candidates, 1.0) == {"small", "large", "costly"}
