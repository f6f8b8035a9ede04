"""The rows of a chunk are those of as many decodes, bit for bit, so that a draft may be computed as one chunk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.compute.backends.base import Backend
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.cpu.backend import KernelBackend, OneDnnBackend
from services.compute.backends.kv_formats import int8
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from tests.adapters import write_adapter
from tests.models import BUNDLED_MODEL
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.kernels.test_decoder import CONFIGS
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.harness import CPU, run_ranks
from tests.unit.compute.model.test_adapters import AdaptedEngine
from tests.unit.compute.model.zoo import prompt

BLOOM = transformers.BloomConfig(vocab_size=203, hidden_size=64, n_layer=2, n_head=4)  # ALiBi: not by our kernels
MODELS = ("biased", "softcap_gelu_tanh", "gelu_tanh_qk_norm", "experts")
KV = {"": None, "int8": int8.FORMAT.open()}
Work = list[tuple[int, int, int]]  # tokens before, rows, adapter
WORK = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 32), st.sampled_from([-1, 0])), min_size=1, max_size=4)
few = settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once({**CONFIGS, "bloom": lambda: BLOOM}, tmp_path_factory, torch.bfloat16)


def load(folder: Path, comm: Communicator, backend: Backend) -> Decoder:
    """A model with an adapter in slot 0."""
    adapter = folder / "adapter"
    if not adapter.exists():
        write_adapter(folder, adapter, dict.fromkeys(("q_proj", "v_proj", "o_proj"), 8), size=0.3)
    model = load_model(describe(folder), comm, backend, adapters=AdapterLayers(1, 8))
    model.adapters.put(0, model.adapters.read(read_adapter(adapter, describe(folder), 8)))
    return model


def assert_rows_are_decodes(model: Decoder, comm: Communicator, work: Work) -> None:
    """Compute a chunk of each sequence; then the same rows as decodes, in the same blocks."""
    engine, chunks = AdaptedEngine(model, comm), []
    for seed, (n_before, n_rows, adapter) in enumerate(work):
        request = engine.admit(prompt(n_before + n_rows, 203, seed))
        engine.slots[id(request)] = adapter
        if n_before:
            engine.step([(request, n_before)])
        chunks.append((request, n_rows))
    batch = engine.batch(sorted(chunks, key=lambda chunk: chunk[1] > 1))
    actual = model.logits(model.forward(batch, engine.cache)).clone()
    written = [layer.clone().view(torch.uint8) for layer in engine.cache.layers]
    last = list(range(len(actual) // 2, len(actual)))
    assert torch.equal(model.logits(model.forward(batch, engine.cache, last)), actual[last])
    _, decodes = batch.alone(range(len(actual)))
    assert torch.equal(model.logits(model.forward(decodes, engine.cache)), actual)
    assert all(map(torch.equal, written, (layer.view(torch.uint8) for layer in engine.cache.layers)))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_chunk_have_the_bits_of_decodes(
    on_threads: OnThreads, name: str, kv: str, checkpoint: Callable[[str], Path]
) -> None:
    """Also where both are replayed, with queries in groups, in sliding windows, and with adapters."""
    comm = SingleRank()
    model = load(checkpoint(name), comm, KernelBackend(on_threads(2), KV[kv]))
    assert model.exact_chunks

    @few
    @given(work=WORK)
    @example(work=[(70, 32, 0), (1, 1, -1), (100, 9, -1), (31, 2, 0)])
    def serve(work: Work) -> None:
        assert_rows_are_decodes(model, comm, work)

    serve()


@few
@given(work=WORK)
@pytest.mark.parametrize("name", ["biased", "softcap_gelu_tanh"])
@pytest.mark.parametrize("kv", KV)
def test_rows_of_a_chunk_in_float32_have_the_bits_of_decodes(
    name: str, kv: str, checkpoint: Callable[[str], Path], work: Work
) -> None:
    model = load(checkpoint(name), SingleRank(), OneDnnBackend(torch.float32, KV[kv]))
    assert model.exact_chunks
    assert_rows_are_decodes(model, SingleRank(), work)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_rows_of_a_chunk_have_the_bits_of_decodes_on_every_rank(
    on_threads: OnThreads, n_ranks: int, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("softcap_gelu_tanh")
    load(folder, SingleRank(), KernelBackend(on_threads(1)))

    def serve(comm: Communicator) -> None:
        model = load(folder, comm, KernelBackend(on_threads(10 + comm.rank)))
        assert_rows_are_decodes(model, comm, [(70, 16, 0), (1, 1, -1), (40, 9, -1)])

    run_ranks(n_ranks, serve)


def test_drafts_are_chunks_where_their_bits_are_promised(checkpoint: Callable[[str], Path]) -> None:
    assert load_model(describe(BUNDLED_MODEL), SingleRank(), open_backend(torch.bfloat16, CPU)).exact_chunks
    for name, backend in (("bloom", OneDnnBackend(torch.bfloat16)), ("biased", TorchBackend(torch.float32, CPU))):
        assert not load_model(describe(checkpoint(name)), SingleRank(), backend).exact_chunks
