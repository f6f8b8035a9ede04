"""What CUDA's backend does by itself: decodes are replayed, memory is counted, tokens are drawn on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.backends.base import Computations, StepGraphs
from services.worker.backends.batch import StepBatch
from services.worker.backends.collectives import SingleRank
from services.worker.backends.cuda.backend import CudaBackend
from services.worker.backends.cuda.graph import CudaDecodes
from services.worker.backends.cuda.memory import CudaMemory
from services.worker.backends.cuda.nccl import NcclCommunicator
from services.worker.backends.cuda.transfers import PinnedTransfers
from services.worker.backends.kv_format import find_kv_format
from services.worker.backends.torch.backend import TorchBackend
from services.worker.backends.torch.ops import TorchOps
from services.worker.ipc.control import RankLine
from services.worker.ipc.segment import Segment
from services.worker.model.adapters.served import read_adapter
from services.worker.model.build import load_model
from services.worker.model.decoder import Decoder
from services.worker.model.layers.adapters import AdapterLayers
from services.worker.model.registry import describe
from tests.adapters import write_adapter
from tests.unit.worker.model.harness import Engine, Request, adapter_rows
from tests.unit.worker.model.zoo import prompt, write_checkpoint
from tests.unit.worker.sampling.drawing import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CUDA = torch.device("cuda")

_SHAPE = {"vocab_size": 300, "num_hidden_layers": 3, "max_position_embeddings": 2048, "hidden_size": 128}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, **_HEADS),
    "mistral_window": lambda: transformers.MistralConfig(**_SHAPE, **_HEADS, sliding_window=70),
    "gemma2": lambda: transformers.Gemma2Config(**_SHAPE, **_HEADS, attn_logit_softcapping=5.0, sliding_window=40),
    "olmo2": lambda: transformers.Olmo2Config(**_SHAPE, **_HEADS),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=192, n_layer=2, n_head=6, n_positions=2048),
    "mixtral": lambda: transformers.MixtralConfig(**_SHAPE, **_HEADS, num_local_experts=16, sliding_window=None),
}
# Contexts on both sides of the smallest graph, and of the next one.
_LENGTHS = [3, 64, 250, 255, 300, 505, 17, 600]
_STEPS = (1, 2, 3, 5, 8, 7, 1, 4, 6, 8, 8, 3)  # sequences in each
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Eager(CudaBackend):
    """Computes every step as it comes."""

    def capture(self, computations: Computations) -> StepGraphs:
        return TorchBackend.capture(self, computations)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_checkpoint(_CONFIGS[name](), path)
        return path

    return make


class Adapted(Engine):
    """Gives the rows of some sequences the adapter in slot 1; some steps have none of them."""

    def batch(self, work: Sequence[tuple[Request, int]]) -> StepBatch:
        rows = [1 if len(request.ids) % 2 else -1 for request, n in work for _ in range(n)]
        return replace(super().batch(work), adapters=adapter_rows(rows, CUDA))


def decode(model: Decoder, kind: type[Engine] = Engine) -> tuple[list[torch.Tensor], Engine]:
    """Decode sequences in changing company; returns each step's rows."""
    engine = kind(model, block_tokens=16)
    requests = [engine.admit(prompt(length + 2 * len(_STEPS), 300, seed)) for seed, length in enumerate(_LENGTHS)]
    engine.step([(request, length) for request, length in zip(requests, _LENGTHS, strict=True)])
    found = []
    for number, n in enumerate(_STEPS):
        company = [requests[(number + place) % len(requests)] for place in range(n)]
        found.append(torch.cat(engine.step([(request, 1) for request in company])))
    return found, engine


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("name", _CONFIGS)
def test_replayed_decodes_are_what_eager_ones_are(name: str, dtype: torch.dtype, folder: Callable[[str], Path]) -> None:
    eager = load_model(folder(name), SingleRank(), Eager(dtype, CUDA))
    model = load_model(folder(name), SingleRank(), CudaBackend(dtype, CUDA))
    expected, by_hand = decode(eager)
    found, engine = decode(model)
    for row, exact in zip(torch.cat(found).float(), torch.cat(expected).float(), strict=True):
        limit = 1.0 if name == "mixtral" and dtype is not torch.float32 else _TOLERANCE[dtype]  # other experts at ties
        assert (row - exact).norm() <= limit * exact.norm()
    for kv, exact in zip(engine.cache.layers, by_hand.cache.layers, strict=True):
        assert not kv[0].any(), "the null block"
        if name != "mixtral":
            assert (kv - exact).float().norm() <= _TOLERANCE[dtype] * exact.float().norm()
    decodes = model._graphs[False].decodes
    assert isinstance(decodes, CudaDecodes)
    assert {sizes.n_rows for sizes in decodes._captured} == {1, 2, 4, 8}
    assert {sizes.n_keys for sizes in decodes._captured} == {256, 512, 1024}


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_replayed_decodes_over_codes_are_what_eager_ones_are(name: str, folder: Callable[[str], Path]) -> None:
    kv_format, dtype = find_kv_format(name), torch.bfloat16
    eager = load_model(folder("llama"), SingleRank(), Eager(dtype, CUDA, kv_format))
    model = load_model(folder("llama"), SingleRank(), CudaBackend(dtype, CUDA, kv_format))
    (expected, _), (found, engine) = decode(eager), decode(model)
    for row, exact in zip(torch.cat(found).float(), torch.cat(expected).float(), strict=True):
        assert (row - exact).norm() <= _TOLERANCE[dtype] * exact.norm()
    assert not any(kv[0].any() for kv in engine.cache.layers), "the null block"
    decodes = model._graphs[False].decodes
    assert isinstance(decodes, CudaDecodes)
    assert decodes._captured


def test_replayed_decodes_with_adapters_are_what_eager_ones_are(folder: Callable[[str], Path], tmp_path: Path) -> None:
    base, dtype = folder("llama"), torch.float16
    write_adapter(base, tmp_path, dict.fromkeys(("q_proj", "v_proj", "o_proj", "down_proj"), 8), size=0.3)
    found = []
    for backend in (Eager(dtype, CUDA), CudaBackend(dtype, CUDA)):
        model = load_model(base, SingleRank(), backend, adapters=AdapterLayers(2, 8))
        model.adapters.put(1, model.adapters.read(read_adapter(tmp_path, describe(base), 8)))
        found.append(torch.cat(decode(model, Adapted)[0]).float())
    for row, exact in zip(found[1], found[0], strict=True):
        assert (row - exact).norm() <= _TOLERANCE[dtype] * exact.norm()
    decodes = {adapted: graphs.decodes for adapted, graphs in model._graphs.items()}
    assert set(decodes) == {False, True}
    assert all(isinstance(one, CudaDecodes) and one._captured for one in decodes.values())


def test_memory_is_what_torch_holds_and_the_device_has_free() -> None:
    memory, size = CudaMemory(CUDA), 256 << 20
    torch.cuda.empty_cache()
    held, available = memory.held(), memory.available(1)
    block = torch.empty(size, dtype=torch.uint8, device=CUDA)
    assert memory.held() - held == size
    assert available - memory.available(1) >= size
    del block
    reserved = memory.report().reserved
    assert memory.report().peak == reserved, "counted from the report before"
    memory.release()
    after = memory.report()
    assert reserved - after.reserved >= size
    assert after.reserved <= after.total - after.free


def test_tokens_are_those_that_a_cpu_draws() -> None:
    logits = torch.randn(10, 512, generator=torch.Generator().manual_seed(4)) * 3
    params = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, seed=2, top_k=5),
        Sampling(temperature=1.3, seed=3, top_p=0.8),
        Sampling(temperature=1.0, seed=4, min_p=0.1),
        Sampling(temperature=0.9, seed=5, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(temperature=0.9, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
        Sampling(repetition_penalty=1.8),
        Sampling(logit_bias={7: 100.0}),
        Sampling(logprobs=5),
    ]
    known = [[3, 7, 7, 200, 7]] * len(params)
    here = draw(logits, params, known=known, n_prompt=2)
    there = draw(logits.to(CUDA), params, known=known, n_prompt=2, ops=TorchOps(torch.float32, CUDA))
    assert np.array_equal(here.token_ids, there.token_ids)
    assert here.logprobs.keys() == there.logprobs.keys() == {9}
    ours, theirs = here.logprobs[9], there.logprobs[9]
    assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
    assert theirs.top_logprobs == pytest.approx(ours.top_logprobs, abs=1e-5)


def test_uploads_are_whole_and_aligned_and_numbers_come_back() -> None:
    transfers = PinnedTransfers(CUDA)
    for round_ in range(6):  # more than there are buffers, and larger ones
        arrays = [np.arange(size, dtype=np.int64) * (round_ + 1) for size in (3, 8 << round_, 1)]
        tables = np.arange(15, dtype=np.int64).reshape(5, 3)
        warmth = np.linspace(0, 1, 3 + round_, dtype=np.float32)
        heat, *found, table = transfers.up([warmth, *arrays, tables])
        assert np.array_equal(heat.cpu(), warmth)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (*found, table))
        assert all(np.array_equal(tensor.cpu(), array) for tensor, array in zip(found, arrays, strict=True))
        assert np.array_equal(table.cpu(), tables)
        assert np.array_equal(transfers.down(found[1]).values(), arrays[1])


def test_a_collective_of_nccl_is_replayed(tmp_path: Path) -> None:
    """By the one rank that there is; what a group of several does, nothing here can show."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        comm = NcclCommunicator(RankLine(Segment.create("test", 4096), 0, 0), 30.0)
        x, graph = torch.ones(4, 8, device=CUDA), torch.cuda.CUDAGraph()
        comm.all_reduce(x)  # opens the connection, which nothing may do in a capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = comm.all_reduce(x * 2)
        x.fill_(3)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 6))
    finally:
        dist.destroy_process_group()
