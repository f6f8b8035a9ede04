"""The small operations of a layer on GPUs against the reference, for drawn sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.compute.backends import keys
from services.compute.backends.cuda import fused
from services.compute.backends.cuda.fused import TritonOps
from services.compute.backends.cuda.grouped import GroupedExperts
from services.compute.backends.cuda.kernels import layer
from services.compute.backends.cuda.logit_shard import CudaLogitShard
from services.compute.backends.cuda.low_rank import TritonLowRank
from services.compute.backends.kv_cache import KvLayer
from services.compute.backends.kv_format import plain_format
from services.compute.backends.shapes import ExpertRouting, ExpertsShape, KvShape
from services.compute.backends.torch.ops import TorchOps
from tests.triton.test_attention import DEVICE
from tests.triton.test_grouped import FFN, HIDDEN, mixture
from tests.unit.compute.sampling.drawing import chances
from tests.unit.compute.sampling.not_finite import NOT_FINITE, check_no_token_on_device

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = st.sampled_from([*LIMITS])


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((actual.float() - exact).abs().max() <= LIMITS[actual.dtype] * (1 + exact.abs().max()))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def both(dtype: torch.dtype) -> tuple[TritonOps, TorchOps]:
    return TritonOps(dtype, DEVICE), TorchOps(torch.float32, DEVICE)


@settings(max_examples=5)
@given(n=st.integers(1, 4), size=st.sampled_from([8, 100, 300]), scale=st.sampled_from([1.0, 0.3]), dtype=DTYPES)
def test_a_sum_and_its_norm(n: int, size: int, scale: float, dtype: torch.dtype) -> None:
    ops, reference = both(dtype)
    weight, x, added = numbers(size, seed=1), numbers(n, size).to(dtype), numbers(n, size, seed=2).to(dtype)
    actual = ops.add_norm(x.clone(), added, scale, ops.rms_norm(weight, 1e-5))
    exact = reference.add_norm(x.float(), added.float(), scale, reference.rms_norm(weight, 1e-5))
    assert all(close(one, other) for one, other in zip(actual, exact, strict=True))


@pytest.mark.parametrize("size", [64, 16_400])
def test_a_norm_alone_also_of_rows_too_wide_for_a_program(size: int) -> None:
    ops, reference = both(torch.bfloat16)
    weight, x, added = numbers(size, seed=1), numbers(2, size).bfloat16(), numbers(2, size, seed=2).bfloat16()
    norm, exact = ops.rms_norm(weight, 1e-5), reference.rms_norm(weight, 1e-5)
    assert close(norm(x), exact(x.float()))
    actual, wanted = ops.add_norm(x.clone(), added, 1.0, norm), reference.add_norm(x.float(), added.float(), 1.0, exact)
    assert all(close(one, other) for one, other in zip(actual, wanted, strict=True))
    in_place = x.clone()
    norm.write(in_place, in_place)
    assert close(in_place, exact(x.float()))


@settings(max_examples=5)
@given(
    n=st.integers(1, 4),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    head_dim=st.sampled_from([16, 24]),
    half=st.sampled_from([4, 8]),
    padding=st.integers(0, 1),
    dtype=DTYPES,
)
def test_heads_are_normalised_rotated_and_cached(
    n: int, heads: tuple[int, int], head_dim: int, half: int, padding: int, dtype: torch.dtype
) -> None:
    """As a layer does: rows of Q, K and V side by side, of which only the first `n` have a place in the cache."""
    (n_q, n_kv), rows = heads, n + padding
    qkv = numbers(rows, (n_q + 2 * n_kv) * head_dim).to(dtype)
    angles = numbers(20, half, seed=1)
    places, positions = torch.tensor([7, 2, 9, 4], device=DEVICE)[:n], torch.arange(rows, device=DEVICE) * 3
    weight = numbers(n_q + n_kv, head_dim, seed=2)
    results = []
    for ops, given_rows in zip(both(dtype), (qkv.clone(), qkv.float()), strict=True):
        view, shape = given_rows.view(rows, -1, head_dim), KvShape(1, n_kv, head_dim)
        norm, rotation = ops.rms_norm(weight, 1e-6), ops.rope(angles.cos(), angles.sin())(positions)
        norm.write(view[:, : n_q + n_kv], view[:, : n_q + n_kv])
        table = torch.zeros(12, shape.width, device=DEVICE, dtype=given_rows.dtype)
        ops.store(KvLayer(plain_format(given_rows.dtype), shape, table), places, given_rows, rotation)
        rotation(view[:, :n_q])  # a second time, in place alone
        results.append((view[:, :n_q], table))
    assert all(close(one, other) for one, other in zip(*results, strict=True))
    assert not results[0][1][[0, 1, 3]].any(), "rows that no slot names"


@settings(max_examples=6)
@given(
    n=st.integers(0, 3),
    size=st.sampled_from([5, 1100]),
    name=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
    dtype=DTYPES,
)
@example(n=2, size=5, name="relu", dtype=torch.float32)  # torch's
def test_gates(n: int, size: int, name: str, dtype: torch.dtype) -> None:
    ops, reference = both(dtype)
    x = 3 * numbers(n, 2 * size).to(dtype)
    actual, exact = ops.gate(name)(x), reference.gate(name)(x.float())  # type: ignore[arg-type]
    assert actual.shape == exact.shape
    assert not n or close(actual, exact)


@pytest.mark.parametrize("n_columns", [48, 9008])
def test_sampled_tokens_equal_torch(n_columns: int) -> None:
    """Greedy rows and drawn ones together; noise differs in the last bits, so tokens are equal but for near ties."""
    logits, first_id = numbers(6, n_columns), 1000
    logits[0, 7] = logits[0, 9] = 50.0  # a tie: the lowest id wins
    temperature = np.array([0, 0, 0.7, 1, 1, 2], np.float32)
    seeds = (np.arange(6, dtype=np.uint64) << np.uint64(40)) - np.uint64(3)
    drawn_by = chances(temperature, seeds, np.arange(6) * 7, DEVICE)
    reference = TorchOps(torch.float32, DEVICE).logit_shard(first_id, n_columns)
    exact = reference.sample(logits.clone(), drawn_by)
    assert int(keys.token_ids_of(exact)[0]) == first_id + 7
    for shard in (
        TritonOps(torch.float32, DEVICE).logit_shard(first_id, n_columns),
        CudaLogitShard(first_id, n_columns, DEVICE),
    ):
        actual = shard.sample(logits.clone(), drawn_by)
        assert torch.equal(keys.token_ids_of(actual), keys.token_ids_of(exact))
        assert torch.allclose(keys.values_of(actual), keys.values_of(exact), rtol=1e-5)
        assert torch.equal(actual[:2], exact[:2]), "greedy scores are the logits"


@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_row_without_finite_logits_draws_no_token(wrong: str) -> None:
    check_no_token_on_device(wrong, 1, TritonOps(torch.float32, DEVICE))


def test_kernels_that_disagree_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(fused.open_ops(torch.bfloat16, DEVICE), TritonOps)
    monkeypatch.setattr(fused, "_TOLERANCE", {torch.bfloat16: 0.0})
    assert not isinstance(fused.open_ops(torch.bfloat16, DEVICE), TritonOps)


def test_kernels_that_do_not_run_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class WithoutDriver:
        def __getitem__(self, grid: object) -> None:
            raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(layer, "gate", WithoutDriver())
    assert not isinstance(fused.open_ops(torch.bfloat16, DEVICE), TritonOps)
    assert "Triton: libcuda.so.1: cannot open shared object file" in caplog.text


def test_experts_and_adapters_that_disagree_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ops, shape = (
        TritonOps(torch.bfloat16, DEVICE),
        ExpertsShape(range(2), HIDDEN, FFN, ExpertRouting(1, normalise=True)),
    )
    assert ops.replays_adapters
    monkeypatch.setattr(GroupedExperts, "__call__", lambda self, x, logits: torch.full_like(x, torch.nan))
    monkeypatch.setattr(TritonLowRank, "add_", lambda *_: None)
    assert ops.disagreement() is None
    assert not ops.replays_adapters
    assert not isinstance(ops.low_rank(8, 8, 1, 4), TritonLowRank)
    assert not isinstance(ops.experts(mixture(torch.bfloat16, range(2), biased=False), shape, "silu"), GroupedExperts)
    assert "experts are computed by torch" in caplog.text
    assert "adapters are computed by torch" in caplog.text
