"""Decodes that attend to some keys only: the texts are those of the definition, however steps are cut and computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from ryzanstein.v1.worker_pb2 import Attention, Sampling

from bench.evaluation import forced
from bench.evaluation.forced import ForcedModel
from services.common.attention import AttentionMode
from services.compute.backends.cpu.backend import open_cpu
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.rank.batching import lay_out
from services.worker.rank.slot_table import SlotTable
from services.worker.scheduling.request import Request
from tests.unit.compute.model.harness import lone_rank
from tests.unit.compute.model.zoo import prompt, write_checkpoint
from tests.unit.worker.rank.late import (
    BLOCK,
    LENGTH,
    N_BLOCKS,
    STATE_ROWS,
    SlowDevice,
    assert_same,
    make_runner,
    serve,
)
from tests.unit.worker.rank.test_decodes import served

VOCAB, END = 99, 98
WINDOWS = (Attention(window=5), Attention(sinks=3, window=20), Attention(sinks=16, window=1))
MODES = [*WINDOWS, Attention(pages=4), Attention(), Attention(pages=4), Attention(pages=5), WINDOWS[0]]
HIDING = [*WINDOWS, Attention(), *WINDOWS]
FAMILIES: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "every key": transformers.LlamaConfig,
    "windows and every key": lambda **sizes: transformers.Gemma3TextConfig(
        **sizes, head_dim=32, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
    "convolutions": lambda **sizes: transformers.Lfm2Config(
        **sizes | {"num_hidden_layers": 3},
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "state spaces": lambda **sizes: transformers.GraniteMoeHybridConfig(
        **sizes | {"num_hidden_layers": 3},
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=64,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
    ),
}
STATEFUL = ("convolutions", "state spaces")


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, transformers.PreTrainedModel]]:
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}

    def make(family: str) -> tuple[Path, transformers.PreTrainedModel]:
        if family not in made:
            folder = tmp_path_factory.mktemp("model")
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
            made[family] = folder, write_checkpoint(FAMILIES[family](**sizes, **heads), folder)
        return made[family]

    return make


def make_requests(modes: Sequence[Attention], seed: int = 0, temperature: float = 1.0) -> list[Request]:
    requests = []
    for number, mode in enumerate(modes):
        rng = random.Random(f"{seed} {number}")
        ids = prompt(rng.randint(20, 40), 88, number)
        sampling = Sampling(temperature=temperature, seed=number, attention=mode)
        requests.append(Request(ids, len(ids), sampling, max_tokens=rng.randint(40, 55)))
    return requests


def kept(attention: Attention, n_keys: int) -> set[int]:
    """The positions that the last of `n_keys` tokens attends to."""
    first, last = -(-attention.sinks // BLOCK) * BLOCK, max(0, n_keys - attention.window) // BLOCK * BLOCK
    return {position for position in range(n_keys) if position < first or position >= last}


@pytest.mark.parametrize("family", ["every key", *STATEFUL])
@pytest.mark.parametrize("attention", WINDOWS, ids=str)
def test_greedy_text_is_that_of_masked_attention(
    family: str, attention: Attention, make_model: Callable[[str], tuple[Path, transformers.PreTrainedModel]]
) -> None:
    """Layers with a state know the whole text."""
    folder, reference = make_model(family)
    (request,), _, _, _ = served(folder, make_requests([attention], temperature=0.0), 0, graphs=False, overlaps=False)
    n, ids = len(request.token_ids), torch.tensor([request.token_ids])
    mask = torch.full((n, n), -torch.inf)
    for row in range(n):
        seen = range(row + 1) if row < request.n_prompt else sorted(kept(attention, row + 1))
        mask[row, list(seen)] = 0
    with torch.inference_mode():
        logits = reference.float()(ids, attention_mask=mask[None, None]).logits[0]
        dense = reference.float()(ids).logits[0]
    drawn = slice(request.n_prompt - 1, n - 1)
    assert logits[drawn].argmax(-1).tolist() == request.token_ids[request.n_prompt :]
    assert not torch.allclose(logits[drawn], dense[drawn], atol=1e-3), "the window hides no key"


@pytest.mark.parametrize(
    ("family", "modes", "graphs"),
    [
        ("every key", MODES, False),
        ("every key", HIDING, True),
        ("windows and every key", HIDING, True),
        *((family, MODES, False) for family in STATEFUL),
        *((family, HIDING, True) for family in STATEFUL),
    ],
)
def test_texts_do_not_depend_on_steps(
    family: str,
    modes: Sequence[Attention],
    graphs: bool,
    make_model: Callable[[str], tuple[Path, transformers.PreTrainedModel]],
) -> None:
    """Neighbours attend in other ways; requests are preempted, and drafts, graphs and overlap change the steps.

    Models with states have no drafts.
    """
    folder, _ = make_model(family)
    expected = [
        served(folder, [request], number, graphs=False, overlaps=False)[:2]
        for number, request in enumerate(make_requests(modes))
    ]
    alone, cut = [request for (request,), _ in expected], {n for n, (_, cancelled) in enumerate(expected) if cancelled}
    texts, n_preempted = [request.token_ids for request in alone], 0
    for guesses in ([], [] if family in STATEFUL else texts):
        actual, also_cut, _, _ = served(
            folder, make_requests(modes), 1, graphs=graphs, overlaps=graphs, mixed=graphs, guesses=guesses
        )
        n_preempted += sum(request.n_preempted for request in actual)
        assert_same(alone, actual, cut | also_cut)
    assert n_preempted


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_our_kernels_do_not_depend_on_steps(
    family: str, make_model: Callable[[str], tuple[Path, transformers.PreTrainedModel]]
) -> None:
    folder, _ = make_model(family)

    def texts(requests: list[Request], seed: int) -> tuple[list[Request], set[int]]:
        decoder, device = (
            load_model(describe(folder), lone_rank(), open_cpu(torch.bfloat16)),
            SlowDevice(random.Random(0)),
        )
        cache = decoder.make_cache(N_BLOCKS, BLOCK, STATE_ROWS, summarised=True)
        return requests, serve(requests, make_runner(decoder, cache, device, overlaps=False), cache, device, seed)

    together, cut = texts(make_requests(MODES), 1)
    for number, request in enumerate(make_requests(MODES)):
        (alone,), also_cut = texts([request], number)
        assert_same([together[number]], [alone], {0} if also_cut or number in cut else set())


@pytest.mark.parametrize("family", STATEFUL)
def test_text_of_pages_that_all_fit_is_dense(
    family: str, make_model: Callable[[str], tuple[Path, transformers.PreTrainedModel]]
) -> None:
    folder, _ = make_model(family)

    def texts(pages: int) -> list[list[int]]:
        requests = make_requests([Attention(pages=pages)] * 8)
        alone = (served(folder, [request], 0, graphs=False, overlaps=False)[0] for request in requests)
        return [request.token_ids for (request,) in alone]

    assert texts(LENGTH // BLOCK) == texts(0)
    assert texts(4) != texts(0)


@pytest.mark.parametrize("kv_dtype", ["", "int8"])
@pytest.mark.parametrize("mode", [AttentionMode(3, 20), AttentionMode(pages=4)], ids=str)
def test_replayed_steps_equal_computed_steps(
    mode: AttentionMode,
    kv_dtype: str,
    make_model: Callable[[str], tuple[Path, transformers.PreTrainedModel]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more than 64 rows a step is computed; with 20 the first is captured, the others are replays."""
    ids, logits = prompt(LENGTH, VOCAB), {}
    for n_rows, shown in ((80, AttentionMode()), (80, mode), (20, mode), (7, mode)):
        model = ForcedModel(make_model("every key")[0], LENGTH, kv_dtype)
        model.prefill(ids[:16])
        monkeypatch.setattr(forced, "_DECODES", n_rows)
        logits[n_rows, shown] = torch.cat(list(model.decodes(ids, 16, shown)))
    assert torch.equal(logits[80, mode], logits[20, mode])
    assert torch.equal(logits[80, mode], logits[7, mode])
    assert torch.equal(logits[80, mode][:20], logits[80, AttentionMode()][:20]), "all blocks are read"
    assert not torch.equal(logits[80, mode], logits[80, AttentionMode()])


def test_a_step_s_tables_name_the_kept_blocks_of_generated_rows() -> None:
    """A prompt's last rows, a resumed text's chunk over the end of its prompt, a decode, and a dense neighbour."""
    table = SlotTable(4, 160, BLOCK, 40)
    window = Attention(sinks=20, window=30)
    kinds = [
        (window, 100, 120, 96, 24),
        (window, 100, 100, 90, 10),
        (window, 60, 130, 129, 1),
        (Attention(), 60, 130, 129, 1),
    ]
    admissions = tuple(
        Admission(slot, Sampling(attention=mode), (1,) * n_known, n_prompt)
        for slot, (mode, n_prompt, n_known, _, _) in enumerate(kinds)
    )
    blocks = [tuple(range(1 + 10 * slot, 11 + 10 * slot)) for slot in range(4)]
    chunks = tuple(
        Chunk(slot, start, n, draws=True, new_blocks=blocks[slot]) for slot, (_, _, _, start, n) in enumerate(kinds)
    )
    plan = view_plan(StepPlan(1, admissions=admissions, chunks=chunks))
    for admission in plan.admissions:
        table.admit(admission)
    table.extend(plan)
    numbers, layout = lay_out(table, plan, exact_chunks=True)
    keys = numbers.narrowed
    assert keys is not None
    read = {}
    for index, slot in enumerate(layout.slots.tolist()):
        mode, n_prompt, *_ = kinds[slot]
        end, length = int(layout.ends[index]), int(keys.lengths[index])
        named = keys.block_tables[index].tolist()
        positions = {blocks[slot].index(named[at // BLOCK]) * BLOCK + at % BLOCK for at in range(length)}
        generated = end > n_prompt and mode.window > 0
        assert positions == (kept(mode, end) if generated else set(range(end)))
        assert not any(named[-(-length // BLOCK) :])
        assert generated <= (layout.ends[index] - layout.starts[index] == 1)
        read[slot, end] = layout.draws[index]
    assert sum(read.values()) == len(kinds)
    assert all(read[slot, start + n] == 1 for slot, (_, _, _, start, n) in enumerate(kinds))
    assert numbers.n_decode == 20 + 1 + 1
    assert sorted(numbers.positions.tolist()) == sorted([*range(96, 120), *range(90, 100), 129, 129])
