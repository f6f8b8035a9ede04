"""On CPU a row's bits depend on its own sequence alone: not on neighbours, their order, chunks or prefix hits.

Whether keys and values are stored as they are computed or in int8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.compute.backends.collectives import SingleRank
from services.compute.backends.cpu.ops import OneDnnOps
from services.compute.backends.kv_formats import int8
from services.compute.backends.names import Activation
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from tests.unit.compute.model.harness import CPU, CachedDecoder, DecoderRequest, cut
from tests.unit.compute.model.zoo import make, prompt, write_checkpoint

Load = Callable[[str, str], Decoder]

_SHAPE = {"vocab_size": 300, "max_position_embeddings": 2048, "tie_word_embeddings": True}
_SMALL = {**_SHAPE, "hidden_size": 128, "intermediate_size": 256}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
_SCANS = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS = {
    # Wide enough in K for oneDNN to choose kernels by the number of rows, were it allowed to.
    "llama": make("LlamaConfig", **_SHAPE, hidden_size=256, intermediate_size=1536),
    "mistral_window": make("MistralConfig", **_SMALL, num_key_value_heads=1, head_dim=160, sliding_window=70),
    "mixtral": make("MixtralConfig", **_SMALL, num_local_experts=4, sliding_window=None),
    "gemma2": make("Gemma2Config", **_SMALL, head_dim=64, attn_logit_softcapping=5.0, sliding_window=40),
    "olmo2": make("Olmo2Config", **_SHAPE, hidden_size=256, intermediate_size=512, num_key_value_heads=4),
    "lfm2": make(
        "Lfm2Config", **_SHAPE, hidden_size=256, intermediate_size=512, layer_types=["full_attention", "conv"]
    ),
    "granitemoehybrid": make(
        "GraniteMoeHybridConfig",
        **{**_SMALL, **_SCANS, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256},
        mamba_n_heads=8,
        mamba_d_state=64,
    ),
    "qwen3_5": make("Qwen3_5TextConfig", **_SMALL, **_DELTA, head_dim=64, layer_types=[*_SCANS["layer_types"][::-1]]),
    "mamba": make("MambaConfig", vocab_size=300, hidden_size=128, time_step_rank=32, tie_word_embeddings=True),
    "minimax": make("MiniMaxConfig", **{**_SMALL, **_SCANS, "intermediate_size": 64, "num_local_experts": 4}),
    "zamba2": make(
        "Zamba2Config",
        **{**_SMALL, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"]},
        adapter_rank=16,
        use_shared_attention_adapter=True,
    ),
    "gpt2": make("GPT2Config", vocab_size=300, n_embd=192, n_head=6, n_positions=2048),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FORMATS = {"": None, "_int8": int8.FORMAT.open()}
_STORED = {f"{name}{suffix}": (dtype, kv) for name, dtype in _DTYPES.items() for suffix, kv in _FORMATS.items()}
_CASES = [
    *((name, dtype) for name in CONFIGS for dtype in _DTYPES),
    *(("gemma2", f"{dtype}_int8") for dtype in _DTYPES),
    ("granitemoehybrid", "bf16_int8"),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folders: dict[str, Path] = {}

    @functools.cache
    def make(name: str, stored: str) -> Decoder:
        dtype, kv = _STORED[stored]
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(CONFIGS[name](), folders[name])
        return load_model(describe(folders[name]), SingleRank(), open_backend(dtype, CPU, kv))

    return make


@functools.cache
def _ids(seed: int, length: int) -> list[int]:
    return prompt(length, 300, seed)


def _alone(model: Decoder, ids: list[int]) -> torch.Tensor:
    """One prefill of everything: what every other way must reproduce."""
    return CachedDecoder(model, block_tokens=16).run(ids, [])


@pytest.mark.parametrize(("name", "stored"), _CASES)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_request_is_the_same_in_any_company_and_chunking(
    name: str, stored: str, load: Load, data: st.DataObject
) -> None:
    model = load(name, stored)
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=2, max_size=5))
    engine = CachedDecoder(model, block_tokens=16)
    requests = [engine.admit(_ids(seed, length)) for seed, length in enumerate(lengths)]
    chunks = [cut(length, data.draw(st.lists(st.integers(1, 70), max_size=6))) for length in lengths]
    actual = _serve(engine, requests, chunks, data)
    for seed, (length, hidden) in enumerate(zip(lengths, actual, strict=True)):
        assert torch.equal(hidden, _alone(model, _ids(seed, length))), (seed, length)


@pytest.mark.parametrize(("name", "stored"), _CASES)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_last_row_is_independent_of_other_requested_rows(
    name: str, stored: str, load: Load, data: st.DataObject
) -> None:
    model = load(name, stored)
    lengths = sorted(data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5)))
    engine = CachedDecoder(model, block_tokens=16)
    requests = [engine.admit(_ids(seed, length)) for seed, length in enumerate(lengths)]
    parts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    for request, part in zip(requests, parts, strict=True):
        if part:
            engine.last_rows([(request, part)], [])
    work = sorted(zip(requests, [len(r.ids) - r.computed for r in requests], strict=True), key=lambda one: one[1] > 1)
    wanted = data.draw(st.lists(st.sampled_from(range(len(work))), unique=True).map(sorted))
    actual = engine.last_rows(work, wanted)
    assert len(actual) == len(wanted)
    for place, hidden in zip(wanted, actual, strict=True):
        assert torch.equal(hidden, _alone(model, work[place][0].ids)[-1])


def _serve(
    engine: CachedDecoder, requests: list[DecoderRequest], chunks: list[list[int]], data: st.DataObject
) -> list[torch.Tensor]:
    """Compute all requests, in each step a random choice of them in random order."""
    actual: list[list[torch.Tensor]] = [[] for _ in requests]
    while any(chunks):
        open_ = [i for i, left in enumerate(chunks) if left]
        chosen = data.draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        for i, hidden in zip(chosen, engine.step([(requests[i], chunks[i].pop(0)) for i in chosen]), strict=True):
            actual[i].append(hidden)
    return [torch.cat(parts) for parts in actual]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "olmo2"])
def test_long_contexts_decode_like_prefill(name: str, dtype: str, load: Load) -> None:
    """Beyond the kernel's key block, and beyond one tile of prefill rows."""
    model, ids = load(name, dtype), _ids(7, 1100)
    expected = _alone(model, ids)
    engine = CachedDecoder(model, block_tokens=16)
    assert torch.equal(engine.run(ids, [500, *[1] * 40, 9, 300, *[1] * 40, 170]), expected)


@pytest.mark.parametrize("stored", _STORED)
def test_a_full_batch_of_decodes_equals_each_alone(stored: str, load: Load) -> None:
    model = load("llama", stored)
    engine = CachedDecoder(model, block_tokens=16)
    lengths = [3, 64, 65, 66, 127, 128, 300, 31] * 5
    requests = [engine.admit(_ids(seed, length)) for seed, length in enumerate(lengths)]
    engine.step([(request, len(request.ids) - 1) for request in requests])
    together = engine.step([(request, 1) for request in requests])
    logits = model.logits(torch.cat(together))
    for seed, (length, hidden) in enumerate(zip(lengths, together, strict=True)):
        expected = _alone(model, _ids(seed, length))[-1:]
        assert torch.equal(hidden, expected), (seed, length)
        assert torch.equal(logits[seed : seed + 1], model.logits(expected)), (seed, length)


@pytest.mark.parametrize("stored", _STORED)
def test_a_prefix_hit_equals_a_miss(stored: str, load: Load) -> None:
    model = load("llama", stored)
    engine = CachedDecoder(model, block_tokens=16)
    first = engine.admit(_ids(1, 100))
    engine.step([(first, 100)])
    second = engine.admit([*first.ids[:96], *_ids(2, 40)])
    second.table[:6], second.computed = first.table[:6], 96
    hit = engine.step([(second, 40)])[0]
    assert torch.equal(hit, _alone(model, second.ids)[96:])


@pytest.mark.parametrize("stored", _STORED)
def test_leftovers_in_free_blocks_cannot_leak(stored: str, load: Load) -> None:
    """A block handed on holds another request's values, even NaN, until they are overwritten."""
    model = load("llama", stored)
    engine = CachedDecoder(model, block_tokens=16)
    for kv in engine.cache.layers:
        kv[1:] = torch.nan if kv.is_floating_point() else 127  # scales of 3e38
    assert torch.equal(engine.run(_ids(4, 90), [30, 1, 50]), _alone(model, _ids(4, 90)))


@pytest.mark.parametrize("name", ["lfm2", "granitemoehybrid", "qwen3_5", "mamba"])
def test_leftovers_in_a_slot_cannot_leak(name: str, load: Load) -> None:
    """A slot handed on holds another request's state, even NaN, until a sequence begins in it."""
    model = load(name, "bf16")
    engine = CachedDecoder(model, block_tokens=16)
    assert engine.cache.states is not None
    for part in (part for parts in engine.cache.states.layers for part in parts):
        part.fill_(torch.nan)
    assert torch.equal(engine.run(_ids(4, 90), [30, 1, 50]), _alone(model, _ids(4, 90)))


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations_are_independent_of_layout_and_threads(name: Activation, dtype: str, n_threads: int) -> None:
    gate = torch.randn(61, 2 * 1056, generator=torch.Generator().manual_seed(0)).to(_DTYPES[dtype]).chunk(2, -1)[0]
    act = OneDnnOps(_DTYPES[dtype]).activation(name)
    expected = torch.cat([act(row) for row in gate.split(1)])
    torch.set_num_threads(n_threads)
    try:
        for n in (2, 16, 32, 33, 47, 61):
            assert torch.equal(act(gate[:n]), expected[:n])
    finally:
        torch.set_num_threads(1)
