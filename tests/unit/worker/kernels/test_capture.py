"""Steps that are replayed: bit for bit what they were when Python called each kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.backends.base import Computations, NoGraph, StepGraphs
from services.worker.backends.collectives import Communicator, SingleRank
from services.worker.backends.cpu import shared_memory
from services.worker.backends.cpu.backend import KernelBackend
from services.worker.backends.cpu.graph import MAX_DECODES, MAX_ROWS, KernelGraph
from services.worker.backends.cpu.shared_memory import SharedMemoryCommunicator
from services.worker.kernels.bfloat16 import REDUCE, Bfloat16Kernels
from services.worker.kernels.bfloat16 import REPLAYED as REPLAYED_CALLS
from services.worker.kernels.capture import CapturedGraph, Growth, Memory, Sizes
from services.worker.model.build import load_model
from services.worker.model.decoder import Decoder
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.rank.runner import Runner
from tests.unit.worker.backends.test_shared_memory import BUFFER, run_group
from tests.unit.worker.kernels.conftest import OnThreads
from tests.unit.worker.model.harness import CPU, Engine, Request, lone_rank, run_ranks
from tests.unit.worker.model.zoo import prompt, write_checkpoint

_VOCABULARY = 203
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
COMPUTED = {
    "experts": _config("MixtralConfig", num_experts_per_tok=2, num_local_experts=4),
    "full_qk_norm": _config("Olmo2Config"),
    "padded": _config("LlamaConfig", intermediate_size=200),
}


class Computing(KernelBackend):
    """Replays nothing."""

    def capture(self, computations: Computations) -> StepGraphs:
        return StepGraphs(NoGraph(), NoGraph())


class Pair:
    """The same decoder twice: one replays its steps, the other computes them all."""

    def __init__(self, folder: Path, comm: Communicator, kernels: Bfloat16Kernels) -> None:
        replaying, computing = (load_model(folder, comm, kind(kernels)) for kind in (KernelBackend, Computing))
        self.model = replaying
        self._engines = [Engine(model, comm, block_size=16) for model in (replaying, computing)]
        self._requests: list[list[Request]] = []

    def admit(self, ids: list[int]) -> int:
        self._requests.append([engine.admit(ids) for engine in self._engines])
        return len(self._requests) - 1

    def left(self, index: int) -> int:
        request = self._requests[index][0]
        return len(request.ids) - request.computed

    def spoil(self, index: int) -> None:
        """A sequence is over, and its blocks hold the worst there is."""
        for engine, request in zip(self._engines, self._requests[index], strict=True):
            for kv in engine.cache.kv:
                kv[request.table] = torch.nan

    def step(self, work: list[tuple[int, int]]) -> None:
        """Let both compute; compare bits."""
        replayed, computed = (
            engine.step([(self._requests[index][which], n) for index, n in work])
            for which, engine in enumerate(self._engines)
        )
        assert all(torch.equal(a, b) for a, b in zip(replayed, computed, strict=True))

    def last_rows(self, work: list[tuple[int, int]], wanted: list[int]) -> None:
        """The same, of the last rows of these sequences alone."""
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
        return all(replay._programs and not replay._gave_up for replay in (self.decodes, self.layers))


def graphs_of(model: Decoder) -> Any:
    (graphs,) = model._graphs.values()
    return graphs


MakePair = Callable[[Callable[[], transformers.PretrainedConfig]], Pair]


@pytest.fixture
def make_pair(kernels: Bfloat16Kernels, tmp_path: Path) -> MakePair:
    def make(config: Callable[[], transformers.PretrainedConfig]) -> Pair:
        write_checkpoint(config(), tmp_path).bfloat16().save_pretrained(tmp_path)
        return Pair(tmp_path, SingleRank(), kernels)

    return make


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_are_the_computed_ones_in_any_order(make_pair: MakePair, name: str) -> None:
    pair = make_pair(REPLAYED[name])

    @settings(max_examples=8)
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


def test_every_number_of_sequences_and_longer_and_longer_ones(make_pair: MakePair) -> None:
    pair = make_pair(REPLAYED["biased"])
    requests = [pair.admit(prompt(MAX_DECODES + 3, _VOCABULARY, seed)) for seed in range(MAX_DECODES + 1)]
    for n in (3, MAX_DECODES, MAX_DECODES + 1, 1, MAX_DECODES, 3):
        pair.step([(index, 1) for index in requests[:n]])
    long = pair.admit(prompt(400, _VOCABULARY))
    pair.step([(long, 30)])
    for n_prompt in (60, 200):
        pair.step([(long, 1)])
        pair.step([(long, n_prompt)])
        pair.step([(long, 1), (requests[0], 1)])
        pair.step([(requests[1], 1), (requests[2], 1)])  # shorter ones after it
        pair.step([(requests[1], 2), (requests[2], 2)])
    pair.spoil(long)
    pair.step([(requests[0], 1), (requests[1], 1)])
    pair.step([(requests[0], 1)])
    assert pair.replays


def test_steps_of_as_many_rows_as_there_is_room_for_and_of_one_more(make_pair: MakePair) -> None:
    """What is larger than a graph may be is computed until two smaller ones tell what it is."""
    pair = make_pair(REPLAYED["window"])
    large = pair.admit(prompt(300, _VOCABULARY))
    pair.step([(large, 200)])
    assert not pair.layers._programs
    for rows in (40, 41, MAX_ROWS, MAX_ROWS + 1):
        one, other = (pair.admit(prompt(300, _VOCABULARY, rows + seed)) for seed in range(2))
        pair.step([(one, rows // 2), (other, rows - rows // 2)])
        assert (Sizes(rows, 2) in pair.layers._programs) is (rows <= MAX_ROWS)


_THIRD = Sizes(21, 7)
_PAIRS = [
    (Sizes(9, 2), Sizes(14, 3), True),
    (Sizes(10, 7), Sizes(15, 7), True),  # a line through the third
    (Sizes(21, 2), Sizes(21, 3), True),
    (Sizes(6, 2), Sizes(12, 4), True),  # three rows each
    (Sizes(10, 1), Sizes(15, 1), False),  # nothing shows what grows with the sequences
    (Sizes(20, 2), Sizes(20, 3), False),
    (Sizes(4, 2), Sizes(6, 3), False),  # what grows may grow with either
]


def _derive(one: CapturedGraph, other: CapturedGraph, sizes: Sizes) -> CapturedGraph | None:
    growth = Growth.between(one, other)
    return growth.of_sizes(sizes) if growth else None


def _run(pair: Pair, requests: list[int], sizes: Sizes) -> None:
    rows = [sizes.rows - 2 * (sizes.sequences - 1)] + [2] * (sizes.sequences - 1)
    pair.step(list(zip(requests, rows, strict=False)))


@pytest.mark.parametrize("name", REPLAYED)
def test_what_two_recordings_say_of_a_third_is_what_it_would_be(make_pair: MakePair, name: str) -> None:
    pair = make_pair(REPLAYED[name])
    requests = [pair.admit(prompt(300, _VOCABULARY, seed)) for seed in range(7)]
    _run(pair, requests, _THIRD)
    (captured,) = pair.layers._graphs
    for one, other, enough in _PAIRS:
        pair.layers._graphs.clear()
        pair.layers._growth = None
        pair.layers._programs.clear()
        for sizes in (one, other):
            _run(pair, requests, sizes)
        first, second = pair.layers._graphs
        derived = _derive(first, second, _THIRD)
        assert (derived is not None) is enough
        if derived is not None:
            assert torch.equal(derived.calls, captured.calls)
            assert (derived.result.offset, derived.sizes) == (captured.result.offset, _THIRD)


def test_what_grows_otherwise_is_not_derived(make_pair: MakePair) -> None:
    pair = make_pair(REPLAYED["biased"])
    requests = [pair.admit(prompt(10, _VOCABULARY, seed)) for seed in range(3)]
    for n in (2, 3):
        pair.step([(index, 1) for index in requests[:n]])
    two, three = pair.decodes._graphs
    seven = Sizes(7, 7)
    assert _derive(two, three, seven) is not None
    assert _derive(two, three, Sizes(7, 6)) is None, "decodes only were captured"
    grown = torch.where(three.counts | (two.calls % 2 == 1), three.calls, two.calls // 2 * 3)
    assert _derive(two, replace(three, calls=grown), seven) is None, "an address is nothing that grows"
    assert _derive(two, replace(three, calls=three.calls + torch.where(three.counts, 1, 0)), seven) is None


def test_a_rank_that_is_warm_records_nothing(make_pair: MakePair) -> None:
    pair = make_pair(REPLAYED["biased"])
    cache = pair.model.make_cache(100, 16)
    sizes = {"n_blocks": 100, "block_size": 16, "max_slots": 8, "max_model_len": 512}
    runner = Runner(pair.model, cache, lone_rank(), **sizes, device=CPU)
    runner.warm_up(64)
    replays = (pair.decodes, pair.layers)
    captured = [list(replay._graphs) for replay in replays]
    prompts = [Admission(slot, Sampling(), (1,) * 40, n_prompt=40) for slot in range(8)]
    chunks = [Chunk(slot, 0, 40, True, tuple(range(4 * slot + 1, 4 * slot + 5))) for slot in range(8)]
    plans = [StepPlan(1, admissions=tuple(prompts[:5]), chunks=tuple(chunks[:5]))]
    decodes = [tuple(Chunk(slot, 40 + step, 1, sample=True) for slot in range(5)) for step in range(2)]
    plans += [StepPlan(2, chunks=decodes[0]), StepPlan(3, admissions=(prompts[5],), chunks=(*decodes[1], chunks[5]))]
    for plan in plans:
        runner.execute(plan)
    assert [replay._graphs for replay in replays] == captured
    assert {Sizes(200, 5), Sizes(45, 6)} <= pair.layers._programs.keys()
    assert Sizes(5, 5) in pair.decodes._programs


@pytest.mark.parametrize(
    ("max_slots", "n_blocks", "max_model_len"), [(1, 100, 512), (8, 5, 512), (8, 100, 66), (8, 100, 67)]
)
def test_a_rank_without_room_for_two_warms_up_with_one(
    make_pair: MakePair, max_slots: int, n_blocks: int, max_model_len: int
) -> None:
    model = make_pair(REPLAYED["biased"]).model
    cache = model.make_cache(n_blocks, 16)
    sizes = {"n_blocks": n_blocks, "block_size": 16, "max_slots": max_slots, "max_model_len": max_model_len}
    Runner(model, cache, lone_rank(), **sizes, device=CPU).warm_up(64)
    captured = [graph.sizes for graph in graphs_of(model).layers._graphs]
    assert captured == [Sizes(64, 1), Sizes(3, 2)][: 1 + (max_model_len == 67)]


@pytest.mark.parametrize("name", COMPUTED)
def test_what_needs_more_than_our_kernels_is_computed(make_pair: MakePair, name: str) -> None:
    pair = make_pair(COMPUTED[name])
    request = pair.admit(prompt(12, _VOCABULARY))
    for n in (1, 2, 1, 1, 3, 1):
        pair.step([(request, n)])
    assert not pair.replays


@pytest.fixture
def replay_on_ranks(on_threads: OnThreads, tmp_path: Path) -> Callable[..., bool]:
    write_checkpoint(REPLAYED["qk_norm"](), tmp_path).bfloat16().save_pretrained(tmp_path)

    def work(comm: Communicator, *sizes: int) -> bool:
        pair = Pair(tmp_path, comm, on_threads(1 + comm.rank))  # a library for each rank, as each process has one
        requests = [pair.admit(prompt(40, _VOCABULARY, seed)) for seed in range(max(sizes))]
        pair.step([(index, 5) for index in requests])
        for n in sizes:
            pair.step([(index, 1) for index in requests[:n]])
            pair.step([(index, 1 + (index == requests[n - 1])) for index in requests[:n]])
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


def test_what_is_replayed_shows_that_the_rank_lives(on_threads: OnThreads) -> None:
    comm = lone_rank()
    x = torch.ones(8, dtype=torch.bfloat16)
    calls = torch.zeros(3, 18, dtype=torch.int64)
    calls[:, 0], calls[:, 1], calls[:, 2] = list(REPLAYED_CALLS).index(REDUCE), x.data_ptr(), len(x)
    assert on_threads(1).replay(calls, 1, comm.collectives) == 3
    assert comm.collectives.tag == 2
    assert ctypes.c_uint64.from_address(comm.collectives.beats).value == 2
    assert torch.equal(x, torch.ones(8, dtype=torch.bfloat16))
    assert on_threads(1).replay(calls, 1, None) == 1


@given(st.lists(st.tuples(st.integers(1, 300), st.sets(st.integers(0, 9), min_size=1)), min_size=1, max_size=12))
def test_tensors_share_room_only_with_those_that_live_at_other_times(made: list[tuple[int, set[int]]]) -> None:
    """Each is named by some of ten calls: from the first to the last of them it is there."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size, _ in made]
    memory = Memory(tensors)
    for index in range(10):
        for tensor, (size, calls) in zip(tensors, made, strict=True):
            if index in calls:
                memory.use(tensor.data_ptr() + size - 1, index)  # a view of it is it
    arena = torch.zeros(memory.place(), dtype=torch.uint8)
    places = [memory.place_of(tensor, arena).tensor(len(tensor)) for tensor in tensors]
    for index in range(10):
        there = [i for i, (_, calls) in enumerate(made) if min(calls) <= index <= max(calls)]
        for i in there:
            places[i].fill_(i + 1)
        assert all((places[i] == i + 1).all() for i in there)
    assert len(arena) <= sum(-(-size // 64) * 64 for size, _ in made)
    last = made[0][0] - 1
    assert memory.moved(tensors[0].data_ptr() + last, arena.data_ptr()) == places[0].data_ptr() + last
    assert memory.moved(arena.data_ptr(), 0) == arena.data_ptr(), "it was there before"
    assert torch.equal(memory.place_of(arena[5:7], tensors[0]).tensor(2), arena[5:7])
