"""Convolutions over last tokens and scans over states on GPUs against the reference, for drawn tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.kernels import states
from services.compute.backends.cuda.states import TritonConvolution, TritonStates
from services.compute.backends.states import ScanTokens, StatePlan, StateRows, segment_table
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.torch.recurrent import TorchConvolution
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from tests.triton.test_attention import DEVICE, INTERPRETED
from tests.unit.compute.model.harness import CachedDecoder
from tests.unit.compute.model.zoo import prompt, reference_logits, write_variant

# Decodes, a prompt of several chunks, and two pieces of a prompt; the first decode and the first piece are copied.
SEGMENTS = (
    StateRows(0, 1, row=5, save=7),
    StateRows(1, 2, row=2),
    StateRows(2, 37, row=0),
    StateRows(37, 55, row=1, save=6),
    StateRows(55, 57, row=1),
)
N_ROWS, N_STATES = 57, 9
LIMIT = 2e-4 if INTERPRETED else 2e-2  # a GPU rounds factors of products
KINDS = ["one", "own", "one corrected", "own corrected", "rates"]
SIZES = st.tuples(st.integers(1, 2), st.sampled_from([1, 10, 20]), st.sampled_from([8, 20, 64]))
Sizes = tuple[int, int, int]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tokens(kind: str, sizes: Sizes) -> ScanTokens:
    """Random tokens for heads of `sizes` n_heads, height and width; some let the state vanish."""
    n_heads, height, width = sizes
    b, c = (numbers(N_ROWS, n_heads, width, seed=seed) / width**0.5 for seed in (1, 2))
    inputs = numbers(N_ROWS, n_heads, height, seed=3)
    if kind == "rates":
        steps = numbers(N_ROWS, n_heads, height, seed=4).abs()
        return ScanTokens(inputs, b, c, steps, rates=-numbers(n_heads, height, width, seed=5).abs())
    decay = numbers(N_ROWS, n_heads, *([width] if "own" in kind else []), seed=4).mul(3).sigmoid()
    decay[10::9] = 0.0
    rate = numbers(N_ROWS, n_heads, seed=6).sigmoid()
    return ScanTokens(inputs, b, c, decay, rate if "corrected" in kind else None)


def of_rows(part: ScanTokens, rows: list[int]) -> ScanTokens:
    rate = None if part.rate is None else part.rate[rows]
    return replace(part, inputs=part.inputs[rows], b=part.b[rows], c=part.c[rows], decay=part.decay[rows], rate=rate)


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(torch.bfloat16, DEVICE)


class StatesAlone(TorchOps):
    """The reference, but for layers with states."""

    def __init__(self, ours: TritonStates) -> None:
        super().__init__(torch.float32, DEVICE)
        self.convolution, self.scan = ours.convolution, ours.scan  # type: ignore[method-assign]


def scanned(ops: TritonOps, part: ScanTokens, sizes: Sizes, plan: StatePlan) -> tuple[torch.Tensor, torch.Tensor]:
    state = numbers(N_STATES, *sizes, seed=7)
    return ops.scan(part, state, plan), state


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter's logarithm of a decay of 0
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1)
@given(sizes=SIZES)
@example(sizes=(1, 16, 300))
def test_scan(ops: TritonOps, kind: str, sizes: Sizes) -> None:
    part, plan = tokens(kind, sizes), StatePlan.of(SEGMENTS, DEVICE)
    actual, state = scanned(ops, part, sizes, plan)
    exact = numbers(N_STATES, *sizes, seed=7).double()
    wide = [None if each is None else each.double() for each in (part.inputs, part.b, part.c, part.decay, part.rate)]
    rates = None if part.rates is None else part.rates.double()
    expected = TorchOps(torch.float32, DEVICE).scan(ScanTokens(*wide, rates), exact, plan)  # type: ignore[arg-type]
    assert (actual - expected).abs().max() <= LIMIT
    assert (state - exact).abs().max() <= LIMIT
    untouched = [3, 4, 8]
    assert torch.equal(state[untouched], numbers(N_STATES, *sizes, seed=7)[untouched])
    assert torch.equal(state[7], state[5])


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("kind", KINDS)
def test_sequence_has_the_same_bits_alone(ops: TritonOps, kind: str) -> None:
    sizes = (2, 10, 20)
    part = tokens(kind, sizes)
    together, advanced = scanned(ops, part, sizes, StatePlan.of(SEGMENTS, DEVICE))
    for one in SEGMENTS[:3]:
        rows = list(range(one.first, one.end))
        plan = StatePlan.of([StateRows(0, len(rows), one.row)], DEVICE)
        actual, state = scanned(ops, of_rows(part, rows), sizes, plan)
        assert torch.equal(actual, together[rows])
        assert torch.equal(state[one.row], advanced[one.row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_taps", "n_channels", "biased"), [(4, 70, True), (3, 130, False), (2, 5, True)])
def test_convolution(dtype: torch.dtype, n_taps: int, n_channels: int, biased: bool) -> None:
    """Rows that lie in wider ones, as a product leaves them."""
    plan, x = StatePlan.of(SEGMENTS, DEVICE), numbers(N_ROWS, n_channels + 6).to(dtype)[:, :n_channels]
    weight, bias = numbers(n_channels, n_taps, seed=1), numbers(n_channels, seed=2) if biased else None
    actual, expected = (numbers(N_STATES, n_taps - 1, n_channels, seed=3).to(dtype) for _ in range(2))
    ours, reference = TritonOps(dtype, DEVICE).convolution(weight, bias), TorchConvolution(weight, bias)
    assert isinstance(ours, TritonConvolution)
    y, exact = ours.filtered(x, actual, plan), reference.filtered(x, expected, plan)
    assert y.dtype is torch.float32
    assert (y - exact).abs().max() <= 1e-5 * (1 + exact.abs().max())
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("cut", [1, 20])
def test_scan_in_float32_has_the_same_bits_in_pieces(own: bool, corrected: bool, cut: int) -> None:
    sizes, ops = (1, 10, 20), TritonOps(torch.float32, DEVICE)
    rows = list(range(2, 37))
    part = of_rows(tokens(f"{'own' if own else 'one'}{' corrected' if corrected else ''}", sizes), rows)
    actual, state = scanned(ops, part, sizes, StatePlan.of([StateRows(0, 35, row=1)], DEVICE))
    pieces = StatePlan.of([StateRows(0, cut, row=1), StateRows(cut, 35, row=1)], DEVICE)
    outputs, in_pieces = scanned(ops, part, sizes, pieces)
    assert torch.equal(outputs, actual)
    assert torch.equal(in_pieces, state)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_graph_touches_no_state(ops: TritonOps, kind: str) -> None:
    sizes, decodes = (2, 10, 20), [StateRows(0, 1, row=5, save=7), StateRows(1, 2, row=2)]
    part = of_rows(tokens(kind, sizes), [0, 1, 1, 1])
    padded = torch.cat((torch.from_numpy(segment_table(decodes)), torch.full((2, 4), -1))).to(DEVICE)
    actual, state = scanned(ops, part, sizes, StatePlan.of_singles(padded))
    expected, exact = scanned(ops, of_rows(part, [0, 1]), sizes, StatePlan.of(decodes, DEVICE))
    assert torch.equal(actual[:2], expected)
    assert torch.equal(state, exact)
    convolution, x = ops.convolution(numbers(20, 3, seed=1), None), numbers(4, 20).bfloat16()
    stored, of_two = (numbers(N_STATES, 2, 20, seed=3).bfloat16() for _ in range(2))
    rows = convolution.activated(x, stored, StatePlan.of_singles(padded))
    assert torch.equal(rows[:2], convolution.activated(x[:2], of_two, StatePlan.of(decodes, DEVICE)))
    assert torch.equal(stored, of_two)


@pytest.mark.parametrize("variant", ["lfm2", "granitemoehybrid_dense", "qwen3_5", "jamba"])
def test_hybrid_model_equals_transformers(variant: str, tmp_path: Path) -> None:
    """Only layers with states are ours; the interpreter computes chunks of float32 without rounding."""
    backend, ids = TorchBackend(torch.float32, DEVICE), prompt()
    backend.ops = StatesAlone(TritonStates(states, exact=not INTERPRETED))
    expected = reference_logits(write_variant(variant, tmp_path), ids)
    model = load_model(describe(tmp_path), SingleRank(), backend)
    logits = model.logits(CachedDecoder(model).run(ids, [5, 1, 17, 2, 1])).cpu()
    assert (logits[:, : expected.shape[1]] - expected).abs().max() <= 1e-4


def test_states_are_left_to_torch_when_kernels_disagree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert TritonOps(torch.bfloat16, DEVICE).replays_states
    monkeypatch.setattr(TritonStates, "scan", lambda self, given, *_: torch.full_like(given.inputs, torch.nan))
    ops, sizes, plan = TritonOps(torch.bfloat16, DEVICE), (1, 10, 8), StatePlan.of(SEGMENTS, DEVICE)
    assert not ops.replays_states
    assert "states are advanced by torch" in caplog.text
    actual, state = scanned(ops, tokens("own", sizes), sizes, plan)
    exact = numbers(N_STATES, *sizes, seed=7)
    assert torch.equal(actual, TorchOps(torch.bfloat16, DEVICE).scan(tokens("own", sizes), exact, plan))
    assert torch.equal(state, exact)
