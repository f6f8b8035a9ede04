"""Steps with prompts as CUDA graphs: on a GPU, and on a CPU that records and repeats what a GPU would capture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda import layer_graphs
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.layer_graphs import LayerGraphs, MixedSizes
from services.compute.backends.kv_format import KvFormat, find_kv_format
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.registry import describe
from tests.adapters import write_adapter
from tests.unit.compute.backends.tape import CPU, DEVICES, Direct, TapedBackend
from tests.unit.compute.backends.test_decodes import Adapted
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.harness import CachedDecoder, DecoderRequest
from tests.unit.compute.model.zoo import make, prompt

_SHAPE = {"vocab_size": 300, "num_hidden_layers": 3, "max_position_embeddings": 512}
_SIZES = _SHAPE | {"hidden_size": 64, "intermediate_size": 96}
_CONFIGS = {
    "llama": make("LlamaConfig", **_SIZES),
    "gemma2": make("Gemma2Config", **_SIZES, head_dim=16, attn_logit_softcapping=5.0, sliding_window=40),
    "gpt2": make("GPT2Config", vocab_size=300, n_embd=64, n_positions=512),
    "mixtral": make("MixtralConfig", **_SIZES, num_local_experts=4, sliding_window=None),
}
_LENGTHS = (90, 33, 7, 61, 120, 18, 2, 44)


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "ROWS", (16, 32, 64))
    monkeypatch.setattr(layer_graphs, "_DECODES", (4, 16))
    monkeypatch.setattr(layer_graphs, "_SEQUENCES", 16)
    monkeypatch.setattr(layer_graphs, "_KEYS", (64, 256))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(_CONFIGS, tmp_path_factory)


def backend_on(device: torch.device, kv_format: KvFormat | None = None, *, graphs: bool) -> CudaBackend:
    if device is CPU:
        return TapedBackend(torch.float32, Direct(), kv_format, graphs=graphs, mixed=True)
    return CudaBackend(torch.float32, device, kv_format, graphs=graphs)


def works(requests: Sequence[DecoderRequest], seed: int) -> Iterator[list[tuple[DecoderRequest, int]]]:
    """Chunks of prompts, cut at random, together with decodes, until all requests are computed."""
    rng = random.Random(seed)
    while left := [request for request in requests if request.computed < len(request.ids)]:
        work = []
        for request in rng.sample(left, min(len(left), rng.randint(1, 5))):
            rest = len(request.ids) - request.computed
            work.append((request, rng.choice((1, 1, min(rest, rng.randint(2, 50))))))
        yield sorted(work, key=lambda part: part[1] > 1)


@torch.inference_mode()
def compute(
    model: Decoder, kind: type[CachedDecoder] = CachedDecoder, seed: int = 0
) -> tuple[list[torch.Tensor], CachedDecoder]:
    """Return the last rows of each step; in every third step those of one sequence, or of none."""
    engine = kind(model, block_tokens=16, n_blocks=100)
    requests = [engine.admit(prompt(length, 300, number)) for number, length in enumerate(_LENGTHS)]
    actual = []
    for number, work in enumerate(works(requests, seed)):
        wanted = range(len(work)) if number % 3 else range(number % 2)
        actual.append(engine.last_rows(work, wanted))
    return actual, engine


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for rows, exact in zip(actual, expected, strict=True):
        assert rows.shape == exact.shape
        assert torch.allclose(rows, exact, atol=1e-4, rtol=1e-4)


def layer_graphs_of(model: Decoder) -> list[LayerGraphs]:
    actual = [graphs.layers for graphs in model._graphs.values()]
    return [graphs for graphs in actual if isinstance(graphs, LayerGraphs)]


def captured(model: Decoder) -> set[MixedSizes]:
    return {sizes for graphs in layer_graphs_of(model) for sizes in graphs._replays}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "kv_format"), [("llama", ""), ("gemma2", ""), ("gpt2", ""), ("mixtral", ""), ("llama", "int8")]
)
def test_replayed_steps_equal_eager_steps(
    name: str, kv_format: str, device: torch.device, folder: Callable[[str], Path]
) -> None:
    form = find_kv_format(kv_format) if kv_format else None
    models = [
        load_model(describe(folder(name)), SingleRank(), backend_on(device, form, graphs=graphs))
        for graphs in (False, True)
    ]
    for seed in range(2):
        (expected, by_hand), (actual, engine) = (compute(model, seed=seed) for model in models)
        assert_same(actual, expected)
        for kv, exact in zip(engine.cache.layers, by_hand.cache.layers, strict=True):
            assert not kv[0].any(), "the null block"
            assert kv_format or torch.allclose(kv, exact, atol=1e-4, rtol=1e-4)
        with torch.inference_mode():
            for graphs in layer_graphs_of(models[1]):
                graphs._inputs.x.fill_(torch.nan)  # as if a request's rows had overflowed
    sizes = captured(models[1])
    assert {size.n_rows for size in sizes} == {16, 32, 64}
    assert {size.n_keys for size in sizes} == {64, 256}


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_steps_with_adapters_equal_eager_steps(
    device: torch.device, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = folder("llama")
    write_adapter(base, tmp_path, dict.fromkeys(("q_proj", "v_proj", "o_proj", "down_proj"), 8), size=0.3)
    results = []
    for graphs in (False, True):
        backend = backend_on(device, graphs=graphs)
        model = load_model(describe(base), SingleRank(), backend, adapters=AdapterLayers(2, 8))
        model.adapters.put(1, model.adapters.read(read_adapter(tmp_path, describe(base), 8)))
        results.append(compute(model, Adapted)[0])
    assert_same(*results)
    assert all(graphs._replays for graphs in layer_graphs_of(model))
    assert len(layer_graphs_of(model)) == 2, "with adapters and without"


def test_a_step_that_needs_the_host_ends_graphs_of_its_size_and_above(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are right, and smaller steps go on being replayed."""
    expected, _ = compute(load_model(describe(folder("llama")), SingleRank(), backend_on(CPU, graphs=False)))
    backend = backend_on(CPU, graphs=True)
    gate = backend.ops.gate("silu")

    def asking(x: torch.Tensor) -> torch.Tensor:
        if len(x) >= 32:
            x.sum().item()
        return gate(x)

    monkeypatch.setattr(backend.ops, "gate", lambda name: asking)
    model = load_model(describe(folder("llama")), SingleRank(), backend)
    assert_same(compute(model)[0], expected)
    assert {size.n_rows for size in captured(model)} == {16}
    assert [graphs._most_rows for graphs in layer_graphs_of(model)] == [31]
