"""Whole decodes are replayed, from ids to tokens: on a CPU that records and repeats what a GPU would capture."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.batch import StepNumbers
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda import graph
from services.compute.backends.draws import DrawNumbers, DrawRows
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.rank.drawn import DrawnTokens
from services.worker.scheduling.request import Request
from tests.unit.compute.backends.tape import TapedBackend
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.zoo import VARIANTS, make, prompt, write_checkpoint
from tests.unit.worker.rank.late import (
    BLOCK,
    LENGTH,
    N_BLOCKS,
    SLOTS,
    STATE_ROWS,
    SlowDevice,
    assert_same,
    make_runner,
    serve,
)
from tests.unit.worker.rank.test_overlap import make_requests

VOCAB = 99
DRAWN = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(make("LlamaConfig", max_position_embeddings=LENGTH)(), folder)
    return folder


def load(folder: Path, device: SlowDevice, *, graphs: bool, mixed: bool = False) -> tuple[Decoder, TapedBackend]:
    backend = TapedBackend(torch.float32, device, graphs=graphs, mixed=mixed)
    return load_model(describe(folder), SingleRank(), backend), backend


def served(
    folder: Path,
    requests: list[Request],
    seed: int,
    *,
    graphs: bool,
    overlaps: bool,
    mixed: bool = False,
    guesses: Sequence[Sequence[int]] = (),
) -> tuple[list[Request], set[int], SlowDevice, TapedBackend]:
    device = SlowDevice(random.Random(seed))
    decoder, backend = load(folder, device, graphs=graphs, mixed=mixed)
    chooses = any(request.sampling.attention.pages for request in requests)
    cache = decoder.make_cache(N_BLOCKS, BLOCK, STATE_ROWS, summarised=chooses)
    runner = make_runner(decoder, cache, device, overlaps=overlaps)
    cut = serve(requests, runner, cache, device, seed, guesses)
    return requests, cut, device, backend


@pytest.mark.parametrize(("seed", "host_share"), [(0, 0.0), (1, 0.0), (2, 0.1), (3, 0.25)])
def test_tokens_of_pipelined_steps_equal_tokens_of_single_steps(seed: int, host_share: float, folder: Path) -> None:
    """Slots change hands, rows come and go, and steps of prompts, and of rows that need the host, lie between."""
    expected, cut, _, _ = served(folder, make_requests(seed, host_share), seed, graphs=False, overlaps=False)
    for overlaps in (False, True):
        requests = make_requests(seed, host_share)
        actual, also_cut, device, backend = served(folder, requests, seed, graphs=True, overlaps=overlaps, mixed=True)
        assert_same(expected, actual, cut | also_cut)
        assert backend.recorder.n_replayed > 20
        assert len(backend.recorder.tapes) == backend.recorder.n_probed
        assert (device.n_overlaps > (1 if host_share else 20)) == overlaps


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 1, 7, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.0, 50: -4.0}]),
    min_tokens=st.sampled_from([0, 0, 4]),
    logprobs=st.sampled_from([None, None, 2]),
    seed=st.integers(0, 2**63),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
KINDS = st.tuples(SAMPLINGS, st.integers(1, 20), st.integers(1, 12))  # tokens of the prompt and of the answer


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(KINDS, min_size=1, max_size=6), seed=st.integers(0, 100))
def test_tokens_are_the_same_with_and_without_overlap_graphs_and_drafts(
    kinds: list[tuple[Sampling, int, int]], seed: int, folder: Path
) -> None:
    def make() -> list[Request]:
        prompts = [prompt(n_prompt, 88, number) for number, (_, n_prompt, _) in enumerate(kinds)]
        return [Request(ids, len(ids), kind[0], max_tokens=kind[2]) for ids, kind in zip(prompts, kinds, strict=True)]

    expected, cut, _, _ = served(folder, make(), seed, graphs=False, overlaps=False)
    texts = [request.token_ids for request in expected]
    for graphs, overlaps, guesses in product((False, True), (False, True), ([], texts)):
        actual, also_cut, _, _ = served(folder, make(), seed, graphs=graphs, overlaps=overlaps, guesses=guesses)
        assert_same(expected, actual, cut | also_cut)


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(VARIANTS, tmp_path_factory)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "mixtral", "qwen3"])
def test_replayed_drafts_change_no_token_of_a_family(
    family: str, family_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a draft is replayed as a sequence of its own, in the blocks of its request."""
    drafted, forward = [], graph.CudaDecodes.forward

    def watched(decodes: graph.CudaDecodes, numbers: StepNumbers, drawn: DrawNumbers | None) -> torch.Tensor:
        drafted.append(len(numbers.lengths) - len(set(numbers.block_tables[:, 0].tolist())))
        return forward(decodes, numbers, drawn)

    def make() -> list[Request]:
        prompts = [prompt(9 + number, 88, number) for number in range(4)]
        samplings = [Sampling(temperature=number / 3, seed=number) for number in range(4)]
        return [Request(ids, len(ids), of, max_tokens=24) for ids, of in zip(prompts, samplings, strict=True)]

    folder = family_folder(family)
    expected, cut, _, _ = served(folder, make(), 0, graphs=False, overlaps=False)
    monkeypatch.setattr(graph.CudaDecodes, "forward", watched)
    texts = [request.token_ids for request in expected]
    for overlaps in (False, True):
        drafted.clear()
        drafted_requests, also_cut, _, _ = served(folder, make(), 0, graphs=True, overlaps=overlaps, guesses=texts)
        assert_same(expected, drafted_requests, cut | also_cut)
        assert sum(drafted) > 2


def launch(folder: Path, plans: list[StepPlan], *, graphs: bool) -> tuple[list[dict[int, int]], SlowDevice]:
    """Launch each step before the one before it is read; returns each step's tokens by slot."""
    device = SlowDevice(random.Random(0))
    decoder, _ = load(folder, device, graphs=graphs)
    runner = make_runner(decoder, decoder.make_cache(N_BLOCKS, BLOCK), device, overlaps=True)
    awaited, results = None, []
    for plan in [*plans, None]:
        launched = runner.launch(view_plan(plan)) if plan else None
        if awaited is not None:
            assert awaited.awaited or not awaited.computing
            results.append(runner.finish(awaited))
        awaited = launched
    drawn = [{record.slot: record.token_ids[0] for record in result.slots} for result in results if result]
    return drawn, device


def decodes(*starts: tuple[int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(slot, start, 1, 1) for slot, start in starts)


def test_a_replayed_step_is_one_upload_and_one_download(folder: Path) -> None:
    first = Admission(0, DRAWN, tuple(prompt(5, VOCAB)), 5)
    plans = [StepPlan(0, (), (first,), (Chunk(0, 0, 5, 1, (1,)),))]
    plans += [StepPlan(n, chunks=decodes((0, 4 + n))) for n in range(1, 5)]
    _, device = launch(folder, plans, graphs=True)
    assert device.n_up == device.n_down == len(plans)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_request_that_has_ended_while_the_next_step_runs_leaves_no_trace(folder: Path, graphs: bool) -> None:
    """Its slot and its block go to another one at once."""
    ended, stays, later = (
        Admission(slot, DRAWN, tuple(prompt(5, VOCAB, seed)), 5) for seed, slot in enumerate((0, 2, 0))
    )
    both = (Chunk(0, 0, 5, 1, (1,)), Chunk(2, 0, 5, 1, (2,)))
    plans = [
        StepPlan(0, (), (ended, stays), both),
        StepPlan(1, chunks=decodes((0, 5), (2, 5))),
        StepPlan(2, chunks=decodes((0, 6), (2, 6))),  # the server has not read that the request ended with step 1
        StepPlan(3, (0,), (later,), (Chunk(0, 0, 5, 1, (1,)), *decodes((2, 7)))),
        StepPlan(4, chunks=decodes((0, 5), (2, 8))),
        StepPlan(5, chunks=decodes((2, 9), (0, 6))),
    ]
    actual, _ = launch(folder, plans, graphs=graphs)
    alone = [
        StepPlan(0, (), (later,), (Chunk(0, 0, 5, 1, (1,)),)),
        StepPlan(1, chunks=decodes((0, 5))),
        StepPlan(2, chunks=decodes((0, 6))),
    ]
    expected, _ = launch(folder, alone, graphs=False)
    assert [tokens[0] for tokens in actual[3:]] == [tokens[0] for tokens in expected]
    alone = [StepPlan(0, (), (stays,), both[1:]), *(StepPlan(n, chunks=decodes((2, 4 + n))) for n in range(1, 6))]
    expected, _ = launch(folder, alone, graphs=False)
    assert [tokens[2] for tokens in actual] == [tokens[2] for tokens in expected]


def test_graphs_are_for_sizes_and_padding_writes_to_no_slot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows, in every order, in a graph of four; then longer contexts in another one."""
    monkeypatch.setattr(graph, "_MIN_KEYS", 8)
    slots = (4, 1, 3)
    admissions = tuple(Admission(slot, DRAWN, tuple(prompt(6, VOCAB, slot)), 6) for slot in slots)
    plans = [StepPlan(0, (), admissions, tuple(Chunk(slot, 0, 6, 1, (slot,)) for slot in slots))]
    for n in range(6):
        order = slots[n % 3 :] + slots[: n % 3]
        plans.append(StepPlan(n + 1, chunks=decodes(*((slot, 6 + n) for slot in order))))
    expected, _ = launch(folder, plans, graphs=False)
    written, draw = [], DrawnTokens.draw

    def watched(drawn: DrawnTokens, logits: torch.Tensor, draws: DrawRows) -> torch.Tensor:
        written.append(draws.slots.clone())
        return draw(drawn, logits, draws)

    monkeypatch.setattr(DrawnTokens, "draw", watched)
    actual, _ = launch(folder, plans, graphs=True)
    assert actual == expected
    assert [sorted(slots.tolist()) for slots in written[1:]] == [[1, 3, 4, SLOTS]] * 4, (
        "two graphs, probed and recorded"
    )


def test_steps_that_need_the_host_are_computed_singly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Admission(0, DRAWN, tuple(prompt(5, VOCAB)), 5)
    plans = [StepPlan(0, (), (admission,), (Chunk(0, 0, 5, 1, (1,)),))]
    plans += [StepPlan(n, chunks=decodes((0, 4 + n))) for n in range(1, 5)]
    expected, _ = launch(folder, plans, graphs=False)
    device = SlowDevice(random.Random(0))
    decoder, backend = load(folder, device, graphs=True)
    logits = decoder.logits

    def asking(hidden: torch.Tensor) -> torch.Tensor:
        actual = logits(hidden)
        assert actual[0, 0].item() != 1.5
        return actual

    monkeypatch.setattr(decoder, "logits", asking)
    runner = make_runner(decoder, decoder.make_cache(N_BLOCKS, BLOCK), device, overlaps=True)
    results = [runner.execute(plan) for plan in plans]
    assert [result.slots[0].token_ids[0] for result in results if result] == [tokens[0] for tokens in expected]
    assert (backend.recorder.n_probed, len(backend.recorder.tapes)) == (1, 0)


def test_graphs_are_freed_with_their_runner(folder: Path) -> None:
    """At once, without a garbage collection: a KV cache is sized by what is free after graphs were measured."""
    device = SlowDevice(random.Random(0))
    decoder, backend = load(folder, device, graphs=True)
    runner = make_runner(decoder, decoder.make_cache(1, BLOCK), device, overlaps=True)
    admission = Admission(0, DRAWN, (7,) * 5, 5)
    runner.rehearse([StepPlan(0, (), (admission,), (Chunk(0, 4, 1, 1, (1,)),))])
    (stored,) = backend.recorder.tapes
    assert stored() is not None
    gc.disable()
    try:
        del runner
        assert stored() is None
    finally:
        gc.enable()
