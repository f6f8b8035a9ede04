"""The kernels for 64-bit ARM under QEMU: what the other files promise holds for them, in a few cases each.

On such a machine itself those files run in full, and this one is not needed.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.kernels.attention import VectorAttention
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels import test_attention as attention
from tests.unit.compute.kernels import test_attention_int8 as attention_int8
from tests.unit.compute.kernels import test_draw as draw
from tests.unit.compute.kernels import test_linear as linear
from tests.unit.compute.kernels import test_pages as pages
from tests.unit.compute.kernels import test_pick as pick
from tests.unit.compute.kernels import test_quantized as quantized
from tests.unit.compute.kernels import test_rows as rows
from tests.unit.compute.kernels.arm import EmulatedLibrary, compile_driver
from tests.unit.compute.kernels.test_attention import KernelCase, KernelKind

pytestmark = [
    pytest.mark.skipif(platform.machine() == "aarch64", reason="the other files run these kernels here"),
    pytest.mark.needs("qemu-aarch64"),
]
FEW = settings(max_examples=5)
SEED = st.integers(0, 99)


@dataclass(frozen=True)
class Arm:
    name: str
    open: Callable[[int], EmulatedLibrary]

    def kernels(self, threads: int = 2) -> Bfloat16Kernels:
        return Bfloat16Kernels(self.open(threads), f"librz_{self.name}")  # type: ignore[arg-type]

    def attention(self, threads: int = 2) -> VectorAttention:
        return VectorAttention(self.open(threads), torch.float32)  # type: ignore[arg-type]

    def kinds(self) -> list[KernelKind]:
        floats = [KernelKind(torch.float32, self.name, self.attention)] if self.name == "neon" else []
        return [KernelKind(torch.bfloat16, self.name, self.kernels), *floats]


@pytest.fixture(scope="module", params=["neon_bf16", "neon"])
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arm]:
    program = compile_driver(request.param, tmp_path_factory.mktemp("arm"))
    with ExitStack() as stack:
        yield Arm(
            request.param, functools.cache(lambda threads: stack.enter_context(EmulatedLibrary(program, threads)))
        )


def promise(test: Any) -> Callable[..., None]:
    """A test of another file without its many examples."""
    return test.hypothesis.inner_test  # type: ignore[no-any-return]


# One row, blocks of rows that are full or not, several groups of outputs, a long row, what no register divides.
@pytest.mark.parametrize(("n", "n_out", "steps"), [(1, 70, 3), (2, 129, 1), (7, 1, 33), (19, 1, 2), (30, 70, 1)])
def test_linear(arm: Arm, n: int, n_out: int, steps: int) -> None:
    shape = {"n": n, "n_out": n_out, "steps": steps}
    for dtype, bias in ((torch.bfloat16, True), (torch.float32, False)):
        exact = promise(linear.test_products_are_exact_up_to_rounding)
        exact(arm.kernels(), **shape, bias=bias, dtype=dtype, strided=bias)
    promise(linear.test_a_row_is_the_same_alone_and_at_any_place)(arm.kernels(), **shape, place=n // 2, seed=n)
    promise(linear.test_neighbours_that_are_not_finite_stay_with_themselves)(arm.kernels(), **shape)
    promise(linear.test_the_number_of_threads_changes_no_bit)(arm.kernels, **shape)
    promise(linear.test_rows_survive_packing_unchanged)(arm.kernels(), **shape, seed=n)


@pytest.mark.parametrize("form", quantized.FORMS)
def test_integers(arm: Arm, form: str) -> None:
    quantized.test_every_code_scale_and_zero_counts(arm.kernels(), form)
    shape = {"form": form, "size": 32, "n_out": 70}
    grouping = "any order" if form == "4 bits with zeros" else "cut off"
    exact = promise(quantized.test_products_are_exact_up_to_the_steps_of_inputs)
    exact(arm.kernels(), grouping=grouping, n=9, n_in=150, bias=True, dtype=torch.float32, **shape)
    promise(quantized.test_a_row_is_the_same_alone_and_at_any_place)(
        arm.kernels(), grouping=grouping, n=14, n_in=96, place=3, **shape
    )


def test_linear_of_subnormal_numbers_and_padded(arm: Arm) -> None:
    for small in ("inputs", "weights"):
        linear.test_subnormal_numbers_count_as_zero_where_pairs_are_multiplied(arm.kernels(), small)
    for n_in in (1, 48):
        linear.test_a_layer_pads_sizes_that_the_kernel_cannot_divide(arm.kernels(), n_in, bias=True)


@pytest.mark.parametrize(
    "case",
    [
        KernelCase(((1, 70), (1, 33), (1, 32), (1, 1)), n_kv=2, group=3, head_dim=64),  # decode
        KernelCase(((31, 31), (2, 65), (1, 64)), n_kv=1, group=7, head_dim=32, window=20, softcap=1.5),  # with prompts
        KernelCase(((9, 40),), n_kv=2, group=1, head_dim=24, block_size=5, sharpness=6.0),
        KernelCase(((1, 50), (2, 40)), group=2, head_dim=248, block_size=16),
    ],
    ids=["decode", "prefill", "odd blocks", "odd heads"],
)
def test_attention_of(arm: Arm, case: KernelCase) -> None:
    for kind in arm.kinds():
        promise(attention.test_attention_equals_its_definition)(kind, case)
        promise(attention.test_the_number_of_threads_changes_no_bit)(kind, case)
        for chosen in (0, 3):
            promise(attention.test_a_row_is_the_same_alone_and_in_a_batch)(kind, case, chosen)


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_pages(arm: Arm, kv_format: str) -> None:
    pages.test_summaries_and_choices_equal_those_of_torch(arm.kernels(), kv_format, 24)
    pages.test_chosen_blocks_are_attended_as_by_the_reference(arm.kernels(), kv_format)


def test_attention_with_scores_far_apart_and_equal(arm: Arm) -> None:
    for kind in arm.kinds():
        attention.test_scores_far_apart_and_equal(kind)


def test_attention_over_int8(arm: Arm) -> None:
    decodes = KernelCase(((1, 70), (1, 33), (1, 32), (1, 1)), n_kv=2, group=3, head_dim=64)
    mixed = KernelCase(((31, 31), (2, 65), (1, 64)), group=7, head_dim=24, window=20, softcap=1.5)
    for kind, case in ((kind, case) for kind in arm.kinds() for case in (decodes, mixed)):
        promise(attention_int8.test_attention_equals_its_definition)(kind, case)
        promise(attention_int8.test_a_row_is_the_same_alone_and_in_a_batch)(kind, case, 2)
    for n, head_dim in ((40, 24), (5, 64)):
        attention_int8.test_rows_are_written_like_torch(arm.kernels(), n, head_dim)


@FEW
@given(data=st.data(), n=st.integers(1, 70), size=st.integers(1, 100), groups=st.integers(0, 3), seed=SEED)
def test_rows_by_themselves(arm: Arm, data: st.DataObject, n: int, size: int, groups: int, seed: int) -> None:
    kernels = arm.kernels()
    promise(rows.test_rms_norm)(kernels, n, size, groups, 1e-5, seed)
    promise(rows.test_add)(kernels, n, size, 0.22, seed)
    promise(rows.test_rotate)(kernels, data, n, 3, size + 1, seed)
    promise(rows.test_write_rows)(kernels, n, size, seed)
    for tanh in (False, True):
        promise(rows.test_gate)(kernels, n, size, tanh, 40.0, seed)


def test_gates_of_extreme_values(arm: Arm) -> None:
    rows.test_gates_of_extreme_values(arm.kernels())


@FEW
@given(n=st.integers(1, 8), sixteens=st.integers(1, 20), first_id=st.integers(0, 200_000), seed=SEED)
def test_tokens(arm: Arm, n: int, sixteens: int, first_id: int, seed: int) -> None:
    kernels = arm.kernels()
    promise(draw.test_the_winner_equals_the_winner_in_torch)(kernels, n, sixteens, first_id, 1.0, seed)
    promise(pick.test_the_best_tokens_have_the_highest_keys)(kernels, n, sixteens, 0.3, 0.25, seed)
    promise(pick.test_the_mass_is_exact)(kernels, n, sixteens, 3.0, seed)


def test_ties_resolve_to_the_lowest_id(arm: Arm) -> None:
    draw.test_ties_resolve_to_the_lowest_id(arm.kernels())
