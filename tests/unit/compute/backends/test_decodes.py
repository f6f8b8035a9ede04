"""Decodes as CUDA graphs: on a GPU, and on a CPU that records and repeats what a GPU would capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.compute.backends.batch import StepBatch, StepNumbers
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.graph import CudaDecodes, GraphSizes
from services.compute.backends.kv_format import KvFormat, find_kv_format
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from tests.adapters import write_adapter
from tests.unit.compute.backends.tape import CPU, CUDA, DEVICES, Direct, TapedBackend, TapeRecorder, on_gpu
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.harness import CachedDecoder, DecoderRequest, adapter_rows
from tests.unit.compute.model.zoo import make, prompt

_SHAPE = {"vocab_size": 300, "max_position_embeddings": 2048, "hidden_size": 128, "intermediate_size": 256}
_LAYERS3 = {**_SHAPE, "num_hidden_layers": 3}
CONFIGS = {
    "llama": make("LlamaConfig", **_LAYERS3),
    "gemma2": make("Gemma2Config", **_LAYERS3, attn_logit_softcapping=5.0, sliding_window=40),
    "gpt2": make("GPT2Config", vocab_size=300, n_embd=192, n_head=6, n_positions=2048),
    "mixtral": make("MixtralConfig", **_LAYERS3, num_local_experts=16, sliding_window=None),
    "qwen3_5": make(
        "Qwen3_5TextConfig",
        **{**_SHAPE, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
    ),
    "mamba": make("MambaConfig", vocab_size=300, hidden_size=64, state_size=8),
    "zamba2": make(
        "Zamba2Config",
        **{**_LAYERS3, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
        n_mamba_heads=8,
        mamba_d_state=16,
        adapter_rank=10,
        num_mem_blocks=2,
        use_mem_rope=True,
    ),
}
# Contexts on both sides of the smallest graph, and of the next one.
_LENGTHS = [3, 64, 250, 255, 300, 505, 17, 600]
_STEPS = (1, 2, 3, 5, 8, 7, 1, 4, 6, 8, 8, 3)  # sequences in each
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def backend_on(device: torch.device, dtype: torch.dtype, kv_format: KvFormat | None = None) -> CudaBackend:
    return TapedBackend(dtype, Direct(), kv_format) if device is CPU else CudaBackend(dtype, device, kv_format)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(CONFIGS, tmp_path_factory)


class Saving(CachedDecoder):
    """Keeps a copy of the states after each step, if there are any."""

    def batch(self, work: Sequence[tuple[DecoderRequest, int]]) -> StepBatch:
        batch = super().batch(work)
        return replace(batch, segments=tuple(replace(one, save=one.row + 32) for one in batch.segments))


class ReplayedDecodes(Saving):
    """Replays steps with one row per sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.decodes = self.model.replay_decodes(self.cache, None)

    def step(self, work: Sequence[tuple[DecoderRequest, int]]) -> list[torch.Tensor]:
        if any(n > 1 for _, n in work):
            return super().step(work)
        numbers = numbers_of(self.batch(work))
        assert self.decodes.serves(numbers)
        for request, _ in work:
            request.computed += 1
        return list(self.decodes.forward(numbers, None).clone().unsqueeze(1))


class Adapted(CachedDecoder):
    """Gives the rows of some sequences the adapter in slot 1; some steps have none of them."""

    def batch(self, work: Sequence[tuple[DecoderRequest, int]]) -> StepBatch:
        rows = [1 if len(request.ids) % 2 else -1 for request, n in work for _ in range(n)]
        return replace(super().batch(work), adapters=adapter_rows(rows, self.cache.layers[0].device))


class AdaptedDecodes(Adapted, Saving):
    """Both."""


class AdaptedReplayed(Adapted, ReplayedDecodes):
    """Both."""


def numbers_of(batch: StepBatch) -> StepNumbers:
    """Return a step of decodes as the host knows it."""
    tensors = (batch.token_ids, batch.positions, batch.kv_slots, batch.block_tables)
    ids, positions, kv_slots, tables = (tensor.cpu().numpy() for tensor in tensors)
    ends, lengths = np.array(batch.query_starts[1:]), np.array(batch.context_lens)
    adapters = batch.adapters.numbers if batch.adapters is not None else None
    of = (ids, positions, kv_slots, ends, lengths, tables, batch.n_decode, None, adapters)
    return StepNumbers(*of, segments=batch.segments)


@torch.inference_mode()
def decode(model: Decoder, kind: type[CachedDecoder] = Saving) -> tuple[list[torch.Tensor], CachedDecoder]:
    """Decode sequences in changing company; returns each step's rows."""
    engine = kind(model, block_tokens=16)
    requests = [engine.admit(prompt(length + 2 * len(_STEPS), 300, seed)) for seed, length in enumerate(_LENGTHS)]
    engine.step([(request, length) for request, length in zip(requests, _LENGTHS, strict=True)])
    actual = []
    for number, n in enumerate(_STEPS):
        company = [requests[(number + place) % len(requests)] for place in range(n)]
        actual.append(torch.cat(engine.step([(request, 1) for request in company])))
    return actual, engine


def captured(engine: CachedDecoder) -> set[GraphSizes]:
    assert isinstance(engine, ReplayedDecodes)
    assert isinstance(engine.decodes, CudaDecodes)
    return set(engine.decodes._captured)


def assert_near(actual: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> None:
    for row, exact in zip(torch.cat(actual).float(), torch.cat(expected).float(), strict=True):
        assert (row - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(CPU, torch.float32, id="recorded"),
        *(pytest.param(CUDA, dtype, id=str(dtype), marks=on_gpu) for dtype in _TOLERANCE),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_decodes_equal_eager_decodes(
    name: str, device: torch.device, dtype: torch.dtype, folder: Callable[[str], Path]
) -> None:
    model = load_model(describe(folder(name)), SingleRank(), backend_on(device, dtype))
    expected, by_hand = decode(model)
    actual, engine = decode(model, ReplayedDecodes)
    limit = 1.0 if name == "mixtral" and dtype is not torch.float32 else _TOLERANCE[dtype]  # other experts at ties
    assert_near(actual, expected, limit)
    for kv, exact in zip(engine.cache.layers, by_hand.cache.layers, strict=True):
        assert not kv[0].any(), "the null block"
        if name != "mixtral":
            assert (kv - exact).float().norm() <= _TOLERANCE[dtype] * exact.float().norm()
    for state, exact in zip(states_of(engine), states_of(by_hand), strict=True):
        assert (state - exact).float().norm() <= _TOLERANCE[dtype] * exact.float().norm()
    assert {sizes.n_rows for sizes in captured(engine)} == {1, 2, 4, 8}
    assert {sizes.n_keys for sizes in captured(engine)} == {256, 512, 1024}


def states_of(engine: CachedDecoder) -> list[torch.Tensor]:
    """Return all rows but the last, which padding may use."""
    states = engine.cache.states
    return [] if states is None else [part[:-1] for parts in states.layers for part in parts]


def test_states_advance_once_when_a_step_needs_the_host(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(recorder: TapeRecorder, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        compute()
        raise RuntimeError("the host is asked after the last layer")

    monkeypatch.setattr(TapeRecorder, "probe", probe)
    model = load_model(describe(folder("qwen3_5")), SingleRank(), backend_on(CPU, torch.float32))
    engines, actual = (CachedDecoder(model), ReplayedDecodes(model)), []
    with torch.inference_mode():
        for engine in engines:
            request = engine.admit(prompt(20, 300))
            engine.step([(request, 19)])
            actual.append(engine.step([(request, 1)])[0])
    torch.testing.assert_close(*actual)
    for part, exact in zip(*map(states_of, engines), strict=True):
        torch.testing.assert_close(part[0], exact[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_replayed_decodes_over_codes_equal_eager_decodes(
    name: str, device: torch.device, folder: Callable[[str], Path]
) -> None:
    dtype = torch.float32 if device is CPU else torch.bfloat16
    model = load_model(describe(folder("llama")), SingleRank(), backend_on(device, dtype, find_kv_format(name)))
    (expected, _), (actual, engine) = decode(model), decode(model, ReplayedDecodes)
    assert_near(actual, expected, _TOLERANCE[dtype])
    assert not any(kv[0].any() for kv in engine.cache.layers), "the null block"
    assert captured(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_decodes_with_adapters_equal_eager_decodes(
    device: torch.device, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base, dtype = folder("llama"), torch.float32 if device is CPU else torch.float16
    write_adapter(base, tmp_path, dict.fromkeys(("q_proj", "v_proj", "o_proj", "down_proj"), 8), size=0.3)
    model = load_model(describe(base), SingleRank(), backend_on(device, dtype), adapters=AdapterLayers(2, 8))
    model.adapters.put(1, model.adapters.read(read_adapter(tmp_path, describe(base), 8)))
    (expected, _), (actual, engine) = decode(model, AdaptedDecodes), decode(model, AdaptedReplayed)
    assert_near(actual, expected, _TOLERANCE[dtype])
    assert {sizes.adapted for sizes in captured(engine)} == {False, True}
