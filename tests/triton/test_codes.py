"""Products with codes of 4 and 8 bits on GPUs are those of the dense weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.cuda.codes import CodesLinear, PackedWeight
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.weights import Dense, Grouped, PerChannel, Rounded, Stacked, Weight
from tests.triton.test_attention import DEVICE

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
FORMS = ["uint4", "uint4 with zeros", "uint8 with zeros and offsets", "int8", "int8 per output", "float8", "rounded"]


def weight_of(form: str, n_out: int, n_in: int, group: int) -> Weight:
    generator = torch.Generator().manual_seed(n_out)
    n_groups = n_in // group
    scale = (torch.rand(n_out, n_groups, generator=generator) / 8 + 0.01).half()
    zero = torch.randint(0, 16, (n_out, n_groups), generator=generator, dtype=torch.uint8)
    groups = torch.arange(n_in) // group
    if form == "rounded":
        return Rounded(torch.randn(n_out, n_in, generator=generator), 0, n_in, 4, group)
    if form == "float8":
        codes = torch.randn(n_out, n_in, generator=generator).to(torch.float8_e4m3fn)
        return Grouped(codes, scale, None, groups)
    if form.startswith("int8"):
        codes = torch.randint(-128, 128, (n_out, n_in), generator=generator, dtype=torch.int8)
        return PerChannel(codes, scale[:, :1] / 16) if "output" in form else Grouped(codes, scale / 16, None, groups)
    codes = torch.randint(0, 16 if "4" in form else 256, (n_out, n_in), generator=generator, dtype=torch.uint8)
    offset = torch.randn(n_out, n_groups, generator=generator) if "offsets" in form else None
    return Grouped(codes, scale / (1 if "4" in form else 16), zero if "zeros" in form else None, groups, offset)


@settings(max_examples=8)
@given(
    form=st.sampled_from(FORMS),
    n=st.sampled_from([0, 1, 3, 20]),
    n_outs=st.sampled_from([(40,), (24, 9)]),
    units=st.sampled_from([2, 4]),
    group=st.sampled_from([32, 64, 128]),
    biased=st.booleans(),
    dtype=st.sampled_from([*LIMITS]),
)
@example(form="float8", n=2, n_outs=(40,), units=2, group=128, biased=False, dtype=torch.bfloat16)
@example(form="uint4 with zeros", n=70, n_outs=(70, 9), units=2, group=32, biased=True, dtype=torch.bfloat16)
def test_a_product_is_that_of_the_dense_weight(
    form: str, n: int, n_outs: tuple[int, ...], units: int, group: int, biased: bool, dtype: torch.dtype
) -> None:
    n_in = 64 * units
    weight = Stacked(tuple(weight_of(form, n_out, n_in, group) for n_out in n_outs))
    bias = torch.linspace(-2, 2, weight.shape[0], device=DEVICE, dtype=dtype) if biased else None
    x = torch.randn(n, n_in + 16, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)[:, :n_in]
    product = TritonOps(dtype, DEVICE).linear(weight, bias)
    assert isinstance(product, CodesLinear)
    exact = x.float() @ weight.dense(dtype, DEVICE).float().T + (0 if bias is None else bias.float())
    for actual in (product(x), product.in_float32(x)):
        assert actual.shape == exact.shape
        assert not n or (actual.float() - exact).abs().max() <= LIMITS[dtype] * (1 + exact.abs().max())


def test_four_bit_weights_take_half_a_byte_and_unsupported_layouts_are_dense() -> None:
    ops, rounded = TritonOps(torch.bfloat16, DEVICE), weight_of("rounded", 40, 128, 32)
    packed = PackedWeight.of(Stacked((rounded,)), DEVICE)
    assert packed is not None
    assert (packed.codes.nbytes, packed.scale.dtype) == (40 * 128 // 2, torch.float16)
    assert ops.form(rounded) == "int4 in groups of 32"
    assert ops.form(rounded, dense=True) == "int4 in groups of 32 as bfloat16"
    ordered = weight_of("uint4", 40, 128, 32)
    assert isinstance(ordered, Grouped)
    by_activation = Grouped(ordered.codes, ordered.scale, None, ordered.groups.flip(0))
    odd = weight_of("uint4", 40, 96, 32)
    for weight in (by_activation, odd, Dense(torch.randn(40, 128))):
        assert not isinstance(ops.linear(Stacked((weight,)), None), CodesLinear)
    mixed = Stacked((ordered, weight_of("int8", 8, 128, 32)))
    assert not isinstance(ops.linear(mixed, None), CodesLinear)


def test_a_product_that_disagrees_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TritonOps(torch.bfloat16, DEVICE)
    monkeypatch.setattr(CodesLinear, "in_float32", lambda self, x: torch.full((len(x), 32), torch.nan, device=x.device))
    assert ops.disagreement() is None
    assert not isinstance(ops.linear(Stacked((weight_of("rounded", 40, 128, 32),)), None), CodesLinear)
