"""Steps that are replayed: bit for bit what they were when Python called each kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.base import Computations, NoGraph, StepGraphs
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.cpu import shared_memory
from services.compute.backends.cpu.backend import KernelBackend
from services.compute.backends.cpu.graph import MAX_DECODES, MAX_ROWS, KernelGraph
from services.compute.backends.cpu.shared_memory import SharedMemoryCommunicator
from services.compute.kernels.bfloat16 import REDUCE, Bfloat16Kernels, StepSizes
from services.compute.kernels.bfloat16 import REPLAYED as REPLAYED_CALLS
from services.compute.kernels.capture import CapturedGraph, GraphCapture, NotReplayableError
from services.compute.kernels.library import FUNCTIONS
from services.compute.kernels.signatures import most_arguments
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from services.compute.ranks.config import Quantization
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.rank.runner import Runner
from tests.unit.compute.backends.test_shared_memory import BUFFER, run_group
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.harness import CPU, CachedDecoder, DecoderRequest, lone_rank, run_ranks
from tests.unit.compute.model.zoo import prompt

_VOCABULARY = 203
_SCANS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
_SLIDES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}


def _config(name: str, **more: Any) -> Callable[[], transformers.PretrainedConfig]:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"vocab_size": _VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 512}
    return lambda: getattr(transformers, name)(**{**sizes, **shape, **more})


REPLAYED = {
    "biased": _config("LlamaConfig", attention_bias=True, mlp_bias=True),
    "one_layer": _config("LlamaConfig", num_hidden_layers=1),
    "window": _config("MistralConfig", head_dim=64, sliding_window=40),
    "qk_norm": _config("Qwen3Config", head_dim=64),
    "softcap_post_norms": _config("Gemma2Config", **_SLIDES, head_dim=64, attn_logit_softcapping=5.0),
    "two_ropes": _config("Gemma3TextConfig", **_SLIDES, head_dim=64),
    "scales": _config("GraniteConfig", embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2),
}
RECURRENT = {  # only decodes are replayed
    "convolutions": _config(
        "Lfm2Config", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention", "conv"]
    ),
    "state_spaces": _config(
        "GraniteMoeHybridConfig",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=192,
        **_SCANS,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
    ),
    "delta_rules": _config("Qwen3_5TextConfig", **_SCANS, **_DELTA, linear_value_head_dim=48, head_dim=64),
}
COMPUTED = {
    "experts": _config("MixtralConfig", num_experts_per_tok=2, num_local_experts=4),
    "full_qk_norm": _config("Olmo2Config"),
    "padded": _config("LlamaConfig", intermediate_size=200),
}


class ComputingBackend(KernelBackend):
    """Replays nothing."""

    def capture(self, computations: Computations) -> StepGraphs:
        return StepGraphs(NoGraph(), NoGraph())


class DecoderPair:
    """The same decoder twice: one replays its steps, the other computes them all."""

    def __init__(
        self, folder: Path, comm: Communicator, kernels: Bfloat16Kernels, quantization: Quantization = "none"
    ) -> None:
        replaying, computing = (
            load_model(describe(folder), comm, kind(kernels), quantization=quantization)
            for kind in (KernelBackend, ComputingBackend)
        )
        self.model = replaying
        self._engines = [CachedDecoder(model, comm, block_tokens=16) for model in (replaying, computing)]
        self._requests: list[list[DecoderRequest]] = []

    def admit(self, ids: list[int]) -> int:
        self._requests.append([engine.admit(ids) for engine in self._engines])
        return len(self._requests) - 1

    def left(self, index: int) -> int:
        request = self._requests[index][0]
        return len(request.ids) - request.computed

    def spoil(self, index: int) -> None:
        """A sequence is over, and its blocks hold the worst there is."""
        for engine, request in zip(self._engines, self._requests[index], strict=True):
            for kv in engine.cache.layers:
                kv[request.table] = torch.nan

    def step(self, work: list[tuple[int, int]]) -> None:
        """Let both compute; compare bits."""
        replayed, computed = (
            engine.step([(self._requests[index][which], n) for index, n in work])
            for which, engine in enumerate(self._engines)
        )
        assert all(torch.equal(a, b) for a, b in zip(replayed, computed, strict=True))

    def last_rows(self, work: list[tuple[int, int]], wanted: list[int]) -> None:
        """The same, of the last rows of these sequences alone; sequences with one row come first."""
        replayed, computed = (
            engine.last_rows([(self._requests[index][which], n) for index, n in work], wanted)
            for which, engine in enumerate(self._engines)
        )
        assert torch.equal(replayed, computed)

    @property
    def decodes(self) -> KernelGraph:
        replay = graphs_of(self.model).decodes
        assert isinstance(replay, KernelGraph)
        return replay

    @property
    def layers(self) -> KernelGraph:
        replay = graphs_of(self.model).layers
        assert isinstance(replay, KernelGraph)
        return replay

    @property
    def replays(self) -> bool:
        graphs = [self.decodes._graph] if self.model.spec.has_state else [self.decodes._graph, self.layers._graph]
        return None not in graphs


def graphs_of(model: Decoder) -> Any:
    (graphs,) = model._graphs.values()
    return graphs


MakePair = Callable[..., DecoderPair]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(REPLAYED | RECURRENT | COMPUTED, tmp_path_factory, torch.bfloat16)


@pytest.fixture
def make_pair(kernels: Bfloat16Kernels, checkpoint: Callable[[str], Path]) -> MakePair:
    return lambda name, quantization="none": DecoderPair(checkpoint(name), SingleRank(), kernels, quantization)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, "none") for name in (*REPLAYED, *RECURRENT)), ("biased", "int8"), ("two_ropes", "int4")],
)
def test_replayed_steps_equal_computed_steps_in_any_order(
    make_pair: MakePair, name: str, quantization: Quantization
) -> None:
    pair = make_pair(name, quantization)

    @settings(max_examples=2)  # for each library, and of many steps each
    @given(st.data())
    def serve(data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(2, 60), min_size=1, max_size=6))
        requests = [pair.admit(prompt(length, _VOCABULARY, seed)) for seed, length in enumerate(lengths)]
        while running := [index for index in requests if pair.left(index)]:
            chosen = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
            longest = data.draw(st.sampled_from([1, 1, 3, 20]))  # also with pieces of prompts
            work = [(index, min(longest, pair.left(index))) for index in chosen]
            if data.draw(st.booleans()):
                pair.step(work)
            else:
                work.sort(key=lambda item: item[1] > 1)
                pair.last_rows(work, data.draw(st.lists(st.sampled_from(range(len(work))), unique=True)))

    serve()
    assert pair.replays


def test_every_batch_size_and_growing_contexts_are_replayed(make_pair: MakePair) -> None:
    pair = make_pair("biased")
    requests = [pair.admit(prompt(MAX_DECODES + 3, _VOCABULARY, seed)) for seed in range(MAX_DECODES + 1)]
    for n in (3, MAX_DECODES, MAX_DECODES + 1, 1, MAX_DECODES, 3):
        pair.step([(index, 1) for index in requests[:n]])
    long = pair.admit(prompt(400, _VOCABULARY))
    pair.step([(long, 30)])
    for n_prompt in (60, 200):
        pair.step([(long, 1)])
        pair.last_rows([(long, n_prompt)], [0])
        pair.step([(long, 1), (requests[0], 1)])
        pair.step([(requests[1], 1), (requests[2], 1)])  # shorter ones after it
        pair.step([(requests[1], 2), (requests[2], 2)])
    pair.spoil(long)
    pair.step([(requests[0], 1), (requests[1], 1)])
    pair.step([(requests[0], 1)])
    assert pair.replays


def test_steps_up_to_the_row_limit_and_one_row_above_are_computed(make_pair: MakePair) -> None:
    """Steps above the largest captured size are computed until a smaller one was captured."""
    pair = make_pair("window")
    large = pair.admit(prompt(300, _VOCABULARY))
    pair.step([(large, 200)])
    assert pair.layers._graph is None
    for rows in (40, MAX_ROWS, MAX_ROWS + 1):
        one, other = (pair.admit(prompt(300, _VOCABULARY, rows + seed)) for seed in range(2))
        pair.last_rows([(one, rows // 2), (other, rows - rows // 2)], [1])
    assert pair.layers._graph is not None


def _relative(graph: CapturedGraph | None) -> tuple[list[int], int, torch.Size, tuple[int, ...]]:
    """A graph, independent of its arena's address: words that point in there are less than 0."""
    assert graph is not None
    start, size, result = graph.arena.data_ptr(), len(graph.arena), graph.result
    words = [*graph.calls.view(-1).tolist(), result.data_ptr()]
    relative = [word - start - size if start <= word < start + size else word for word in words]
    return relative, size, result.shape, result.stride()


@pytest.mark.parametrize("name", REPLAYED)
def test_every_step_gives_the_same_graph(make_pair: MakePair, name: str) -> None:
    """So that one of them is enough: nothing but the declared counts grows with rows or sequences."""
    pair = make_pair(name)
    requests = [pair.admit(prompt(300, _VOCABULARY, seed)) for seed in range(7)]
    several = [(2,), (9,), (64,), (1, 2), (9, 5), (1, 1, 1, 1, 30, 20, 2)]
    decodes = [(1,), (1,) * 2, (1,) * 7, *several]
    pair.step([(requests[0], 1)])
    for replay, steps in ((pair.decodes, decodes), (pair.layers, several)):
        graphs = []
        for rows in steps:
            replay._graph = None
            work = list(zip(requests, rows, strict=False))
            if replay is pair.decodes:
                pair.step(work)
            else:
                pair.last_rows(work, [0])
            graphs.append(_relative(replay._graph))
        for graph in graphs[1:]:
            assert graph == graphs[0]


_WEIGHT, _CACHE = torch.ones(32), torch.zeros(1, 16, 2, 32, dtype=torch.bfloat16)
_LONE = (torch.tensor([0, 6]), torch.tensor([6]), torch.zeros(1, 1, dtype=torch.int64))


class Unfit:
    """Steps of six rows and two sequences."""

    def __init__(self, kernels: Bfloat16Kernels) -> None:
        self.kernels, self.x = kernels, torch.ones(6, 32, dtype=torch.bfloat16)
        self.capture = GraphCapture(kernels, lambda x: x, StepSizes(6, 2))

    def foreign(self) -> None:
        self.x.exp() + 1

    def rows(self) -> None:
        self.kernels.add_(self.x[:4], self.x[2:], 1.0)

    def summand(self) -> None:
        self.capture.reduce(self.x[1:])

    def sequences(self) -> None:
        out = torch.empty(6, 32, dtype=torch.bfloat16)
        self.kernels.attend(self.x, out, _CACHE, (1, 1, 32, 16, 1.0, 0.0, 0), _LONE)

    def other_shape(self) -> None:
        self.kernels.rms_norm(self.x, _WEIGHT, 1e-6, torch.empty(2, 96, dtype=torch.bfloat16).view(6, 32))

    def later_rows(self) -> None:
        self.kernels.rms_norm(self.x, _WEIGHT, 1e-6, torch.empty(6, 128, dtype=torch.bfloat16).view(24, 32)[12:18])


UNFIT = [
    (Unfit.foreign, "they need add, exp"),
    (Unfit.rows, "they call rz_add with a row_count of 4, which is 6 in the step"),
    (Unfit.summand, "they call all_reduce with a row_count of 5, which is 6 in the step"),
    (Unfit.sequences, "they call rz_attend with a sequence_count of 1, which is 2 in the step"),
    (Unfit.other_shape, r"they make a tensor \[2, 96\] where the step has 6 rows"),
    (Unfit.later_rows, r"they use a tensor \[6, 128\] from its row 3 on"),
]


@pytest.mark.parametrize(("step", "words"), UNFIT, ids=lambda value: getattr(value, "__name__", ""))
def test_steps_with_unexpected_counts_are_not_replayed(
    kernels: Bfloat16Kernels, step: Callable[[Unfit], None], words: str
) -> None:
    unfit = Unfit(kernels)
    with unfit.capture.noting():
        step(unfit)
    with pytest.raises(NotReplayableError, match=words):
        unfit.capture.graph(64, unfit.x)


@pytest.mark.parametrize(
    ("max_running", "n_blocks", "max_model_len"), [(8, 100, 512), (1, 100, 512), (8, 5, 512), (8, 100, 66)]
)
def test_a_warm_rank_records_no_graph(make_pair: MakePair, max_running: int, n_blocks: int, max_model_len: int) -> None:
    pair = make_pair("biased")
    cache = pair.model.make_cache(n_blocks, 16)
    sizes = {"n_blocks": n_blocks, "block_tokens": 16, "max_running": max_running, "max_model_len": max_model_len}
    runner = Runner(pair.model, cache, lone_rank(), **sizes, device=CPU)
    runner.warm_up(64)
    captured = (pair.decodes._graph, pair.layers._graph)
    assert pair.replays
    slots = range(min(max_running, n_blocks // 3))
    for slot in slots:
        admission = Admission(slot, Sampling(), (1,) * 40, n_prompt=40)
        chunk = Chunk(slot, 0, 40, True, tuple(range(3 * slot + 1, 3 * slot + 4)))
        decodes = tuple(Chunk(before, 40 + slot - before - 1, 1, draws=True) for before in range(slot))
        runner.execute(StepPlan(1 + slot, admissions=(admission,), chunks=(*decodes, chunk)))
    runner.execute(StepPlan(9, chunks=tuple(Chunk(slot, 40 + slots[-1] - slot, 1, draws=True) for slot in slots)))
    assert (pair.decodes._graph, pair.layers._graph) == captured


@pytest.mark.parametrize("name", COMPUTED)
def test_a_model_beyond_our_kernels_is_computed(make_pair: MakePair, name: str) -> None:
    pair = make_pair(name)
    request = pair.admit(prompt(12, _VOCABULARY))
    for n in (1, 2, 1, 1, 3):
        pair.step([(request, n)])
    pair.last_rows([(request, 4)], [0])
    assert (pair.decodes._gave_up, pair.layers._gave_up) == (True, True)
    assert not pair.replays


@pytest.fixture
def replay_on_ranks(on_threads: OnThreads, checkpoint: Callable[[str], Path]) -> Callable[..., bool]:
    folder = checkpoint("qk_norm")

    def work(comm: Communicator, *sizes: int) -> bool:
        pair = DecoderPair(folder, comm, on_threads(1 + comm.rank))  # a library for each rank, as each process has one
        requests = [pair.admit(prompt(40, _VOCABULARY, seed)) for seed in range(max(sizes))]
        pair.step([(index, 5) for index in requests])
        for n in sizes:
            pair.step([(index, 1) for index in requests[:n]])
            pair.step([(index, 1 + (index == requests[0])) for index in requests[:n]])
            pair.last_rows([(index, 1 + (index == requests[n - 1])) for index in requests[:n]], [n - 1])
        return pair.replays

    return work


def test_ranks_replay_between_their_collectives(replay_on_ranks: Callable[..., bool]) -> None:
    assert run_ranks(2, lambda comm: replay_on_ranks(comm, 1, 2, 3, 1, 2, 3, 3)) == [True, True]


@pytest.mark.parametrize("looks", [0, 1 << 28])
def test_ranks_in_shared_memory_replay_their_collectives(
    replay_on_ranks: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """A rank that does not look out at all leaves it to Python to wait; and so do sums too large for one round."""
    monkeypatch.setattr(shared_memory, "_LOOKS", looks)
    fits, large = BUFFER // (2 * 128), BUFFER // (2 * 128) + 1

    def work(comm: SharedMemoryCommunicator) -> tuple[bool, int]:
        comm.begin_step(0)
        replays = replay_on_ranks(comm, 1, fits, large, 2, large, fits)
        before = comm.collectives.elapsed_ns
        assert before > 0
        assert comm.take_elapsed_us() == before // 1000
        return replays, comm.collectives.rounds

    first, second = run_group(2, work)
    assert first == second
    assert first[0]


def test_a_replayed_step_counts_as_a_sign_of_life(on_threads: OnThreads) -> None:
    comm = lone_rank()
    x = torch.ones(8, dtype=torch.bfloat16)
    calls, sizes = torch.zeros(3, 1 + most_arguments(FUNCTIONS), dtype=torch.int64), StepSizes(2, 1)
    calls[:, 0], calls[:, 1], calls[:, 3] = list(REPLAYED_CALLS).index(REDUCE), x.data_ptr(), 4
    assert on_threads(1).replay(calls, 1, sizes, comm.collectives) == 3
    assert comm.collectives.tag == 2
    assert ctypes.c_uint64.from_address(comm.collectives.beats).value == 2
    assert torch.equal(x, torch.ones(8, dtype=torch.bfloat16))
    assert on_threads(1).replay(calls, 1, sizes, None) == 1
