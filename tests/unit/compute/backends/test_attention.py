"""Backends agree with the definition of attention, or are not used."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from services.compute.backends import choice
from services.compute.backends.batch import StepBatch
from services.compute.backends.choice import check_attention, choose_attention
from services.compute.backends.cpu.attention import PagedAmx, PagedInt8, PagedVectors
from services.compute.backends.kv_cache import KvCache
from services.compute.backends.kv_format import Coding, ScaledCodes, plain_format
from services.compute.backends.opening import open_backend
from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.torch.attention import ReferenceAttention
from services.compute.backends.torch.gathering import PagedSdpa
from services.compute.backends.torch.ops import TorchOps
from tests.unit.compute.model.harness import CPU

DEVICES = [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]
FLOAT32 = plain_format(torch.float32)
SHAPE = AttentionShape(n_heads=6, n_kv_heads=2, head_dim=32, scale=0.2, softcap=None)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(6, 2, 32), (3, 3, 80), (8, 1, 192)])
def test_the_gathering_backend_is_right(
    device: torch.device, dtype: torch.dtype, softcap: float | None, n_heads: int, n_kv_heads: int, head_dim: int
) -> None:
    shape = AttentionShape(n_heads, n_kv_heads, head_dim, head_dim**-0.5, softcap)
    assert check_attention(PagedSdpa(shape, dtype, device), shape, dtype, device, plain_format(dtype)) is None


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 21])
def test_decodes_are_laid_out_on_the_device_as_by_the_host(
    device: torch.device, softcap: float | None, window: int | None
) -> None:
    """The plan of a captured step: no length is known to the host, and there is room for more keys than there are."""
    shape, lengths, size = AttentionShape(6, 2, 32, 0.2, softcap), [1, 16, 17, 300, 512], 16
    n_blocks = [-(-length // size) for length in lengths]
    blocks = torch.randperm(sum(n_blocks), generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.full((len(lengths), 40), 99)  # beyond a sequence's end anything may be left
    for row, own in enumerate(blocks.split(n_blocks)):
        tables[row, : len(own)] = own
    ops = TorchOps(torch.float32, device)
    cache = KvCache(FLOAT32, 1, int(blocks.max()), KvShape(size, 2, 32), torch.float32, device, ops)
    layer = cache.layers[0]
    layer[1:] = torch.randn(layer[1:].shape, generator=torch.Generator().manual_seed(1)).to(device)
    q = torch.randn(len(lengths), 6 * 32, generator=torch.Generator().manual_seed(2)).to(device)
    counts = torch.tensor(lengths)
    batch = StepBatch(
        token_ids=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        positions=(counts - 1).to(device),
        kv_slots=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        query_starts=tuple(range(len(lengths) + 1)),
        context_lens=tuple(lengths),
        block_tables=tables.clamp(max=cache.n_blocks).to(device),
        n_decode=len(lengths),
    )
    reference, attention = ReferenceAttention(shape), PagedSdpa(shape, torch.float32, device)
    expected = reference.attend(q, cache, 0, reference.plan(batch, size, window))
    for n_keys in (512, 1024):
        plan = attention.decode_plan(counts.to(device), tables.to(device), n_keys, size, window)
        assert (attention.attend(q, cache, 0, plan) - expected).abs().max() <= 1e-5


class WrongScale(PagedSdpa):
    def __init__(self) -> None:
        super().__init__(AttentionShape(6, 2, 32, 0.3, None), torch.float32, CPU)


class ForgetsTheWindow(PagedSdpa):
    def __init__(self) -> None:
        super().__init__(SHAPE, torch.float32, CPU)

    def plan(self, batch: StepBatch, block_tokens: int, window: int | None) -> object:
        return super().plan(batch, block_tokens, None)


class LeavesRowsUnwritten(PagedSdpa):
    def __init__(self) -> None:
        super().__init__(SHAPE, torch.float32, CPU)

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: object) -> torch.Tensor:
        out = super().attend(q, cache, layer, plan)
        out[-5:] = torch.nan
        return out


class Raises(PagedSdpa):
    def __init__(self) -> None:
        super().__init__(SHAPE, torch.float32, CPU)

    def attend(self, q: torch.Tensor, cache: KvCache, layer: int, plan: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")


@pytest.mark.parametrize("wrong", [WrongScale, ForgetsTheWindow, LeavesRowsUnwritten, Raises])
def test_a_wrong_backend_is_passed_over_with_a_warning(wrong: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = choose_attention(
            [wrong, lambda: PagedSdpa(SHAPE, torch.float32, CPU)], SHAPE, torch.float32, CPU, FLOAT32
        )
    assert type(chosen) is PagedSdpa
    assert f"{wrong.__name__} is not used" in caplog.text


def test_an_attention_with_a_missing_library_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> PagedSdpa:
        raise ImportError("No module named 'triton'")

    with caplog.at_level(logging.WARNING):
        choices = [missing, lambda: PagedSdpa(SHAPE, torch.float32, CPU)]
        assert type(choose_attention(choices, SHAPE, torch.float32, CPU, FLOAT32)) is PagedSdpa
    assert "an attention is not used: No module named 'triton'" in caplog.text


def test_no_right_backend_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no attention computes"):
        choose_attention([Raises], SHAPE, torch.float32, CPU, FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_chosen_by_codes_and_not_by_the_name_of_a_format(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    eight, other = (ScaledCodes("unnamed", Coding(codes, 127.0)) for codes in (torch.int8, torch.float8_e4m3fn))
    assert type(open_backend(dtype, CPU, eight).attention(SHAPE)) is PagedInt8
    assert type(open_backend(dtype, CPU, plain_format(dtype)).attention(SHAPE)) in {PagedVectors, PagedAmx}
    assert "dequantizes keys" not in caplog.text
    assert type(open_backend(dtype, CPU, other).attention(SHAPE)) is PagedSdpa
    assert "each step gathers and dequantizes keys in unnamed" in caplog.text


def test_a_passed_check_of_a_shape_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[AttentionShape] = []
    monkeypatch.setattr(choice, "check_attention", lambda _, shape, *__, **___: checked.append(shape))
    other, passed = replace(SHAPE, softcap=2.0), set[tuple[AttentionShape, type]]()
    for shape in (SHAPE, SHAPE, other, SHAPE):
        candidate = partial(PagedSdpa, shape, torch.float32, CPU)
        choose_attention([candidate], shape, torch.float32, CPU, FLOAT32, passed)
    assert checked == [SHAPE, other]
