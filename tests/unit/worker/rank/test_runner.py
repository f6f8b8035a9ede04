"""The runner applies deltas: however the work is cut into steps, the tokens are those of the whole sequence."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import SingleRank
from services.compute.token_logprobs import NO_TOKEN
from services.worker.protocol.plan import Admission, Chunk, SlotResult, StepPlan, StepResult
from services.worker.rank.runner import Runner
from services.worker.rank.slot_table import MalformedPlanError
from tests.unit.compute.model.harness import lone_rank
from tests.unit.worker.rank.standin import (
    VOCAB,
    StandinCache,
    StandinDecoder,
    standin_cache,
)

BLOCK, N_BLOCKS, SLOTS, LENGTH = 4, 60, 8, 40
GREEDY = Sampling()


def make_runner(decoder: StandinDecoder | None = None) -> Runner[StandinCache]:
    return Runner(
        decoder or StandinDecoder(SingleRank()),
        standin_cache(N_BLOCKS, BLOCK),
        lone_rank(),
        n_blocks=N_BLOCKS,
        block_tokens=BLOCK,
        max_running=SLOTS,
        max_model_len=LENGTH,
        device=torch.device("cpu"),
    )


def all_logits(tokens: list[int]) -> torch.Tensor:
    """The stand-in's logits after each position, from its definition: [n, VOCAB]."""
    decoder = StandinDecoder(SingleRank())
    scale = 1 + torch.arange(len(tokens)).unsqueeze(-1) / 7
    return decoder.logits((decoder.embedding[tokens] * scale).double().cumsum(dim=0).float())


def continuation(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(all_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def result_of(runner: Runner[StandinCache], plan: StepPlan) -> StepResult:
    result = runner.execute(plan)
    assert result is not None
    return result


class RunnerRequest:
    """A request and what a scheduler would know of it."""

    def __init__(self, slot: int, prompt: list[int], blocks: list[int]) -> None:
        self.slot, self.prompt, self.computed, self.admitted = slot, prompt, 0, False
        self._blocks, self._held = blocks, 0
        self.generated: list[int] = []

    def chunk(self, n_tokens: int) -> Chunk:
        known = len(self.prompt) + len(self.generated)
        n_tokens = min(n_tokens, known - self.computed)
        start, self.computed = self.computed, self.computed + n_tokens
        needed = -(-self.computed // BLOCK)
        new, self._held = self._blocks[self._held : needed], max(needed, self._held)
        return Chunk(self.slot, start, n_tokens, self.computed == known, tuple(new))


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_computes_the_same_tokens(seed: int) -> None:
    """Random chunk sizes, random batches, random blocks, slots used again."""
    rng = random.Random(seed)
    runner, step = make_runner(), 0
    for _ in range(2):
        free = rng.sample(range(1, N_BLOCKS + 1), N_BLOCKS)
        requests = [
            RunnerRequest(slot, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], free[slot * 7 :][:7])
            for slot in rng.sample(range(SLOTS), SLOTS)
        ]
        while any(len(request.generated) < 6 for request in requests):
            batch = [r for r in requests if len(r.generated) < 6 and rng.random() < 0.7]
            fresh = [r for r in batch if not r.admitted]
            for request in fresh:
                request.admitted = True
            admissions = tuple(Admission(r.slot, GREEDY, tuple(r.prompt), len(r.prompt)) for r in fresh)
            plan = StepPlan(step, (), admissions, tuple(r.chunk(rng.choice([1, 1, 2, 5, 30])) for r in batch))
            result, step = result_of(runner, plan), step + 1
            drawn = {record.slot: record.token_ids[0] for record in result.slots}
            assert set(drawn) == {chunk.slot for chunk in plan.chunks if chunk.draws}
            for request in requests:
                if request.slot in drawn:
                    request.generated.append(drawn[request.slot])
        for request in requests:
            assert request.generated == continuation(request.prompt, 6)
        runner.execute(StepPlan(step, released=tuple(range(SLOTS))))
        step += 1


@pytest.mark.parametrize("exact_chunks", [False, True])
@pytest.mark.parametrize("n_right", [0, 1, 3])
def test_proposals_stand_up_to_the_first_wrong_one(n_right: int, exact_chunks: bool) -> None:
    """Whether its draws need the history or not, a slot has the tokens and log-probabilities of single steps.

    A draft is one sequence where the device promises the bits of decodes. Prompts are computed in the same step.
    """
    scored = Sampling(logprobs=2, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2)
    prompts = {1: ([5, 6, 7, 8], GREEDY), 4: ([9, 2], scored)}
    admitted = Admission(2, GREEDY, (7, 7), 2), Admission(6, GREEDY, (5, 4, 3, 2), 4)
    admissions = tuple(Admission(slot, of, tuple(ids), len(ids)) for slot, (ids, of) in prompts.items())
    prefills = tuple(
        Chunk(slot, 0, len(ids), True, tuple(range(10 * slot, 10 * slot + 4))) for slot, (ids, _) in prompts.items()
    )
    single = make_runner()
    steps = [result_of(single, StepPlan(0, (), admissions, prefills))]
    for n in range(5):
        chunks = tuple(Chunk(slot, len(ids) + n, 1, True) for slot, (ids, _) in prompts.items())
        steps.append(result_of(single, StepPlan(n + 1, chunks=chunks)))
    alone = {slot: [record for step in steps for record in step.slots if record.slot == slot] for slot in prompts}

    decoder = StandinDecoder(SingleRank(), exact_chunks=exact_chunks)
    runner = make_runner(decoder)
    runner.execute(StepPlan(0, (), admissions, prefills))
    chunks = [Chunk(6, 0, 3, False, (50,)), Chunk(2, 0, 2, True, (51,))]
    for slot, (ids, _) in prompts.items():
        right = [record.token_ids[0] for record in alone[slot][1:4]]
        guesses = [token if n < n_right else (token + 1) % VOCAB for n, token in enumerate(right)]
        chunks.append(Chunk(slot, len(ids), 4, True, (), tuple(guesses)))
    verified = result_of(runner, StepPlan(1, admissions=admitted, chunks=tuple(chunks)))
    assert decoder.last is not None
    assert decoder.last.n_sequences == (4 if exact_chunks else 10)
    assert {record.slot for record in verified.slots} == {1, 2, 4}
    chunks = tuple(Chunk(slot, len(ids) + n_right + 1, 1, True) for slot, (ids, _) in prompts.items())
    following = result_of(runner, StepPlan(2, chunks=chunks))
    for slot in prompts:
        records = [record for step in (verified, following) for record in step.slots if record.slot == slot]
        for name in ("token_ids", "logprobs"):
            expected = [row for record in alone[slot][1 : n_right + 3] for row in getattr(record, name)]
            assert [row for record in records for row in getattr(record, name)] == expected


class OverflowingDecoder(StandinDecoder):
    row = -1  # row with NaN logits; -1: none

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        if self.row >= 0:
            logits[self.row] = torch.nan
        return logits


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(logprobs=1, repetition_penalty=1.2)])
@pytest.mark.parametrize("n_right", [0, 3])
def test_row_without_finite_logits_ends_a_draft_only_when_its_proposals_stand(sampling: Sampling, n_right: int) -> None:
    decoder, prompt = OverflowingDecoder(SingleRank()), [5, 6, 7, 8]
    admission, prefill = Admission(1, sampling, tuple(prompt), 4), Chunk(1, 0, 4, True, (1, 2, 3))
    single, runner = make_runner(), make_runner(decoder)
    steps = [single.execute(StepPlan(0, (), (admission,), (prefill,)))]
    steps += [single.execute(StepPlan(n + 1, chunks=(Chunk(1, 4 + n, 1, True),))) for n in range(3)]
    tokens = [step.slots[0].token_ids[0] for step in steps if step]
    runner.execute(StepPlan(0, (), (admission,), (prefill,)))
    decoder.row = 2
    guesses = tokens[1:4] if n_right else [(token + 1) % VOCAB for token in tokens[1:4]]
    (record,) = result_of(runner, StepPlan(1, chunks=(Chunk(1, 4, 4, True, (), tuple(guesses)),))).slots
    assert record.token_ids == ((*tokens[1:3], NO_TOKEN) if n_right else (tokens[1],))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(4, 1, 2, True, (), (7,)), "do not follow the last known token"),
        (Chunk(4, 2, 2, True, (), (7, 7)), "do not follow the last known token"),
        (Chunk(4, 2, 1 + LENGTH, True, (), (7,) * LENGTH), "beyond position"),
    ],
)
def test_proposals_after_another_token_than_the_last_are_refused(chunk: Chunk, message: str) -> None:
    runner = make_runner()
    runner.execute(StepPlan(0, (), (Admission(4, GREEDY, (9, 2), 2),), (Chunk(4, 0, 2, True, (4,)),)))
    with pytest.raises(MalformedPlanError, match=message):
        runner.execute(StepPlan(1, chunks=(chunk,)))


def test_resume_continues_with_the_tokens_generated_before() -> None:
    prompt = [5, 6, 7]
    known = [*prompt, *continuation(prompt, 3)]
    runner = make_runner()
    plan = StepPlan(
        0,
        (),
        (Admission(1, GREEDY, tuple(known), n_prompt=3),),
        (Chunk(1, 0, len(known), True, (9, 3)),),
    )
    assert result_of(runner, plan).slots == (SlotResult(1, tuple(continuation(known, 1))),)


def test_prompt_logprobs_of_a_chunked_prompt() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    runner = make_runner()
    request = Admission(2, Sampling(prompt_logprobs=2), tuple(prompt), len(prompt))
    first = result_of(runner, StepPlan(0, (), (request,), (Chunk(2, 0, 5, False, (1, 2)),)))
    second = result_of(runner, StepPlan(1, chunks=(Chunk(2, 5, 3, True),)))
    actual = [row for result in (first, second) for record in result.slots for row in record.prompt_logprobs]
    exact = torch.log_softmax(all_logits(prompt).double(), dim=-1)
    assert [row.token_id for row in actual] == prompt[1:]
    for position, row in enumerate(actual):
        assert row.logprob == pytest.approx(exact[position, prompt[position + 1]].item(), abs=1e-4)
        assert row.top_ids == tuple(exact[position].topk(2).indices.tolist())
    assert not result_of(runner, StepPlan(2, chunks=(Chunk(2, 8, 1, True, (3,)),))).slots[0].prompt_logprobs


def test_pooled_request_returns_the_normalised_mean_and_no_token() -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    runner = make_runner()
    pooled = Admission(0, GREEDY, tuple(tokens), len(tokens), embed=True)
    other = Admission(1, GREEDY, (8,), 1)
    first = StepPlan(0, (), (pooled, other), (Chunk(0, 0, 4, False, (1,)), Chunk(1, 0, 1, True, (2,))))
    assert [record.slot for record in result_of(runner, first).slots] == [1]
    result = result_of(runner, StepPlan(1, chunks=(Chunk(0, 4, 2, True, (3,)),)))
    scale = 1 + torch.arange(6).unsqueeze(-1) / 7
    hidden = (StandinDecoder(SingleRank()).embedding[tokens] * scale).cumsum(dim=0)
    expected = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)
    (record,) = result.slots
    assert record.token_ids == ()
    assert np.allclose(record.pooled, expected.numpy(), atol=1e-5)


def test_result_carries_logprobs_and_times() -> None:
    request = Admission(4, Sampling(logprobs=1), (1, 2), 2)
    result = result_of(make_runner(), StepPlan(0, (), (request,), (Chunk(4, 0, 2, True, (1,)),)))
    (record,) = result.slots
    assert [row.token_id for row in record.logprobs] == list(record.token_ids)
    assert result.times.forward > 0
    assert result.times.sample > 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(0, chunks=(Chunk(3, 0, 1, True),)), r"slot 3's chunk \[0, 1\) covers a token that is not"),
        (StepPlan(0, chunks=(Chunk(8, 0, 1, True),)), "within 0 to 7"),
        (StepPlan(0, released=(-1,)), "within 0 to 7"),
        (StepPlan(0, (), (Admission(0, GREEDY, (), 0),)), "admitted with 0 tokens; 1 to 40"),
        (StepPlan(0, (), (Admission(0, GREEDY, (1,) * 41, 1),)), "admitted with 41 tokens; 1 to 40"),
        (StepPlan(0, (), (Admission(0, GREEDY, (1,), 2),)), "n_prompt 2 of 1"),
        (
            StepPlan(0, (), (Admission(0, GREEDY, (1,) * 9, 9),), (Chunk(0, 0, 9, True, (1, 2)),)),
            "a position without a block",
        ),
        (
            StepPlan(0, (), (Admission(0, GREEDY, (1,), 1),), (Chunk(0, 0, 1, True, (61,)),)),
            "outside 1 to 60",
        ),
        (
            StepPlan(0, (), (Admission(0, GREEDY, (1, 2), 2),), (Chunk(0, 0, 1, False, (1,)), Chunk(0, 1, 1, True))),
            "two chunks",
        ),
        (StepPlan(0, chunks=(Chunk(0, 0, 0, False),)), "an empty or negative range"),
    ],
)
def test_malformed_plans_are_named_not_computed(plan: StepPlan, message: str) -> None:
    with pytest.raises(MalformedPlanError, match=message):
        make_runner().execute(plan)
