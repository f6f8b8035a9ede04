"""Layers of integers: every code, scale, zero and offset counts, in any blocks, and company changes no bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from services.compute.backends.cpu.codes import divide
from services.compute.backends.cpu.quantized import QuantizedLinear
from services.compute.backends.weights import Dense, Grouped, PerChannel, Rounded, Stacked, Weight
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.kernels.numbers import FLOAT32, assert_rounded, normal

# How far an input, which becomes an integer of 16 or 8 bits, may be off, in parts of the largest of its block.
OFF, OFF_8 = 2.0**-15, 0.51 / 127
HALF = torch.bfloat16


@dataclass(frozen=True)
class RandomWeights:
    """Random weights of one form."""

    bits: int
    signed: bool = False
    zeros: str = "none"  # "none", "middle", "any"
    offsets: bool = False
    half: bool = True  # numbers of groups are float16 numbers
    per_output: bool = False
    rounded: bool = False  # while it is read, in groups of 32

    @property
    def off(self) -> float:
        """How far an input may be off, in parts of the largest."""
        return OFF_8 if self.rounded else OFF

    def make(self, seed: int, n_out: int, groups: torch.Tensor) -> Weight:
        """A weight with inputs in these groups."""
        generator = torch.Generator().manual_seed(seed)
        if self.rounded:
            values = torch.randn(n_out, len(groups), generator=generator)
            return Rounded(values.bfloat16(), 0, len(groups), 4, 32)
        low, high = (-128, 128) if self.signed else (0, 1 << self.bits)
        codes = torch.randint(low, high, (n_out, len(groups)), generator=generator)
        codes[0, 0], codes[-1, -1] = low, high - 1  # the ends are there
        n_groups = int(groups.max()) + 1
        shape = (n_out, 1 if self.per_output else n_groups)
        scale = torch.randn(shape, generator=generator) * 0.01
        offset = torch.randn(shape, generator=generator) * 0.1
        if self.half:
            scale, offset = scale.half(), offset.half()
        if self.per_output:
            return PerChannel(codes.char(), scale)
        zero = None
        if self.zeros == "middle":
            zero = torch.full(shape, 1 << (self.bits - 1), dtype=torch.uint8)
        if self.zeros == "any":
            zero = torch.randint(0, 1 << self.bits, shape, generator=generator).byte()
        stored = codes.char() if self.signed else codes.byte()
        return Grouped(stored, scale, zero, groups, offset if self.offsets else None)


FORMS = {
    "int8 per output": RandomWeights(8, signed=True, per_output=True, half=False),
    "int8 in groups": RandomWeights(8, signed=True),
    "int8 with offsets": RandomWeights(8, signed=True, offsets=True, half=False),
    "uint8 with zeros": RandomWeights(8, zeros="any"),
    "6 bits": RandomWeights(6, zeros="middle"),
    "5 bits with minima": RandomWeights(5, offsets=True),
    "4 bits": RandomWeights(4, zeros="middle"),
    "rounded to 4 bits": RandomWeights(4, rounded=True),
    "4 bits with zeros": RandomWeights(4, zeros="any"),
    "4 bits with minima": RandomWeights(4, offsets=True),
    "3 bits": RandomWeights(3, zeros="middle"),
    "2 bits": RandomWeights(2, zeros="middle", half=False),
}
# Groups of inputs: in order, cut off at both ends as a rank's part is, as GPTQ's act-order has them, all in one.
GROUPINGS = {
    "in order": lambda n_in, size: torch.arange(n_in) // size,
    "cut off": lambda n_in, size: (torch.arange(n_in) + size // 2 + 3) // size,
    "any order": lambda n_in, size: torch.randint(
        0, -(-n_in // size), (n_in,), generator=torch.Generator().manual_seed(n_in)
    ),
    "one": lambda n_in, size: torch.zeros(n_in, dtype=torch.int64),
}
CASES = {
    "form": st.sampled_from(list(FORMS)),
    "grouping": st.sampled_from(list(GROUPINGS)),
    "size": st.sampled_from([16, 32, 64, 128, 256]),
    "n": st.one_of(st.integers(1, 14), st.sampled_from([128, 135])),
    "n_in": st.one_of(st.integers(1, 700), st.sampled_from([576, 1056])),
    "n_out": st.integers(1, 200),
}


def numbers(weight: Weight) -> torch.Tensor:
    return weight.rows(0, weight.shape[0]).double()


def allowed(x: torch.Tensor, off: float, weight: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """How far sums may be: the steps of the inputs, and the roundings of sums of `terms`, sizes like `weight`."""
    largest = x.double().abs().amax(1, keepdim=True)  # row maximum, at least that of each block
    return largest * off * weight.abs().sum(1) + x.double().abs() @ terms.T * FLOAT32 * 8


def parts_of(weight: Weight) -> torch.Tensor:
    """Sizes of the terms that are added up: codes times scales, zeros times scales, offsets."""
    if not isinstance(weight, Grouped):
        return numbers(weight).abs()
    spread = weight.scale.double().abs() * 256 + (0 if weight.offset is None else weight.offset.double().abs())
    return spread[:, weight.groups]


@given(**CASES, bias=st.booleans(), dtype=st.sampled_from([HALF, torch.float32]))
@example(form="4 bits", grouping="in order", size=32, n=4, n_in=576, n_out=64, bias=True, dtype=torch.float32)
@example(
    form="4 bits with zeros", grouping="any order", size=128, n=7, n_in=512, n_out=65, bias=False, dtype=torch.bfloat16
)
@example(form="int8 per output", grouping="one", size=128, n=131, n_in=1056, n_out=129, bias=True, dtype=torch.bfloat16)
def test_products_are_exact_up_to_the_steps_of_inputs(
    kernels: Bfloat16Kernels,
    form: str,
    grouping: str,
    size: int,
    n: int,
    n_in: int,
    n_out: int,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    weight = FORMS[form].make(n_in, n_out, GROUPINGS[grouping](n_in, size))
    x, added = normal(1, n, n_in), normal(2, n_out).float() if bias else None
    layer = QuantizedLinear(kernels, Stacked((weight,)), added)
    actual = layer(x) if dtype is torch.bfloat16 else layer.in_float32(x)
    exact = x.double() @ numbers(weight).T + (0 if added is None else added.double())
    slack = allowed(x, FORMS[form].off, numbers(weight), parts_of(weight)) + exact.abs() * FLOAT32 * 4
    assert_rounded(actual, exact, slack)


@pytest.mark.parametrize("form", FORMS)
def test_every_code_scale_and_zero_counts(kernels: Bfloat16Kernels, form: str) -> None:
    """A unit input finds each number alone, bit for bit: a wrong nibble, sign or place is another number."""
    n_in, n_out = 96, 70
    weight = FORMS[form].make(3, n_out, torch.arange(n_in) // 32)
    layer = QuantizedLinear(kernels, Stacked((weight,)), None)
    actual = layer.in_float32(torch.eye(n_in).bfloat16()).T
    slack = 2.0**-22 * parts_of(weight).clamp(min=1e-6)
    assert ((actual - numbers(weight)).abs() <= slack).all()
    ids = torch.tensor([n_out - 1, 0, 33, 64, 0])
    assert layer.looks_up
    close = torch.isclose(layer.rows(ids).double(), numbers(weight)[ids], rtol=2.0**-8, atol=1e-6)
    assert close.all()
    for outside in (-1, n_out):
        with pytest.raises(IndexError, match="outside 0 to 69"):
            layer.rows(torch.tensor([3, outside]))


@pytest.mark.parametrize("form", ["int8 per output", "4 bits", "rounded to 4 bits", "2 bits"])
def test_the_largest_sums_are_exact(kernels: Bfloat16Kernels, form: str) -> None:
    """Codes and inputs at their ends: a block's sum is the largest that its integers hold."""
    weight = FORMS[form].make(1, 64, torch.arange(256) // 128)
    codes = weight.values if isinstance(weight, Rounded) else weight.codes
    codes[0], codes[1] = codes.amin().item(), codes.amax().item()
    x = torch.ones(2, 256).bfloat16()
    x[1] = -1
    actual = QuantizedLinear(kernels, Stacked((weight,)), None).in_float32(x)[:, :2].double()
    assert torch.allclose(actual, x.double() @ numbers(weight)[:2].T, rtol=1e-6, atol=0)


@given(**CASES, place=st.integers(0, 1000))
def test_a_row_is_the_same_alone_and_at_any_place(
    kernels: Bfloat16Kernels, form: str, grouping: str, size: int, n: int, n_in: int, n_out: int, place: int
) -> None:
    layer = QuantizedLinear(kernels, Stacked((FORMS[form].make(5, n_out, GROUPINGS[grouping](n_in, size)),)), None)
    row, company = normal(place, 1, n_in), normal(place + 1, n, n_in, scale=9.0)
    company[::2] = torch.nan
    company[place % n] = row
    actual = layer.in_float32(company)
    assert torch.equal(actual[place % n], layer.in_float32(row)[0])
    others = torch.arange(n) % 2 == 0
    others[place % n] = False
    assert actual[others].isnan().all()


@pytest.mark.parametrize("form", ["int8 per output", "4 bits with zeros"])
def test_the_number_of_threads_changes_no_bit(on_threads: OnThreads, form: str) -> None:
    weight, x = FORMS[form].make(1, 900, torch.arange(320) // 64), normal(2, 19, 320)
    actual = [QuantizedLinear(on_threads(n), Stacked((weight,)), None).in_float32(x) for n in (1, 2, 3)]
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


@pytest.mark.parametrize("form", ["int8 in groups", "rounded to 4 bits"])
@pytest.mark.parametrize("scale", [2.0**-130, 2.0**-100, 1.0, 2.0**100])
def test_inputs_of_any_size(kernels: Bfloat16Kernels, form: str, scale: float) -> None:
    """Blocks below 2^-112 count as zero, as their products are no normal numbers in most layers."""
    weight, x = FORMS[form].make(1, 64, torch.arange(128) // 32), normal(1, 5, 128)
    x[2] *= 0
    exact = x.double() @ numbers(weight).T * scale
    actual = QuantizedLinear(kernels, Stacked((weight,)), None).in_float32((x.double() * scale).bfloat16()).double()
    if scale < 2.0**-112:
        exact = exact * 0
    error = (actual - exact).abs() / scale
    assert (
        error <= allowed(x, FORMS[form].off, numbers(weight), parts_of(weight)) + exact.abs() / scale * FLOAT32 * 4
    ).all()


def test_parts_of_several_forms_are_one_layer(kernels: Bfloat16Kernels) -> None:
    """Parts with the same blocks and bits are one product, zeros join them, and other numbers stay dense."""
    groups = torch.arange(256) // 64
    integers = [FORMS[form].make(seed, 33, groups) for seed, form in enumerate(["4 bits", "4 bits", "6 bits"])]
    dense = Dense(normal(7, 20, 256))
    weight = Stacked((*integers, dense, FORMS["4 bits"].make(9, 10, groups), Dense(torch.zeros(5, 256))))
    x, bias = normal(1, 6, 256), normal(2, 134).float()
    layer = QuantizedLinear(kernels, weight, bias)
    exact = x.double() @ torch.cat([numbers(part) for part in weight.parts]).T + bias.double()
    slack = torch.cat([allowed(x, OFF, numbers(part), numbers(part).abs()) for part in weight.parts], dim=1)
    assert_rounded(layer.in_float32(x), exact, slack + exact.abs() * FLOAT32 * 4)
    assert not layer.looks_up
    assert QuantizedLinear(kernels, Stacked((integers[0], integers[1])), None).looks_up


@given(n_in=st.integers(1, 600), size=st.sampled_from([8, 16, 24, 128, 700]), grouping=st.sampled_from(list(GROUPINGS)))
def test_blocks_hold_every_input_once_and_never_two_groups(n_in: int, size: int, grouping: str) -> None:
    groups = GROUPINGS[grouping](n_in, size)
    blocks = divide(groups, 128)
    places = torch.arange(blocks.k) if blocks.order is None else blocks.order
    places = places.where(places < n_in, -1)
    assert sorted(places[places >= 0].tolist()) == list(range(n_in))
    assert blocks.k % 16 == blocks.size % 16 == 0
    assert blocks.size <= 128
    for start in range(0, blocks.k, blocks.size):
        inputs = places[start : start + blocks.size]
        of_block = blocks.groups[start // blocks.size // blocks.common]
        assert (groups[inputs[inputs >= 0]] == of_block).all()


@pytest.mark.parametrize(("bits", "group", "worst"), [(8, 32, 0.006), (4, 32, 0.09), (4, 128, 0.11)])
def test_rounded_weights_are_close_and_the_same_in_parts(bits: int, group: int, worst: float) -> None:
    values = normal(1, 40, 576)
    values[3], values[4, :200] = 0, 2.0**-30
    whole = Rounded(values, 0, 576, bits, group)  # type: ignore[arg-type]
    numbers_of_all = whole.rows(0, 40)
    assert (numbers_of_all - values.float()).norm() / values.float().norm() < worst
    parts = [Rounded(values, start, start + 144, bits, group).rows(0, 40) for start in range(0, 576, 144)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(parts, dim=1), numbers_of_all)
    low, high = whole.ends()
    assert low <= numbers_of_all.min() <= numbers_of_all.max() <= high
    assert torch.equal(whole.take(torch.tensor([7, 3])).rows(0, 2), numbers_of_all[[7, 3]])
